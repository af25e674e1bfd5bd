"""One step's work for the model: rows of committed tokens and draft trees, and how they are packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gammaray.kernels.api import PagedBatch
from gammaray.types import MAX_TREE_NODES


@dataclass(frozen=True, slots=True)
class Row:
    """What one sequence feeds in one forward pass: `pending`, then `tree_tokens[fed:]`.

    Tree node i lives in the logical slot start + len(pending) + i, whatever its depth; its position id is
    start + len(pending) - 1 + depth, where children of the root (parent -1: the last committed token) have
    depth 1. Logits come for the last `logits` pending tokens, then for the fed nodes in order.
    """

    pending: Sequence[int]  # committed tokens without KV yet, a causal chain
    start: int  # logical slot and position of pending[0]
    blocks: Sequence[int]  # block table, covers start + len(pending) + len(tree_tokens) slots
    tree_tokens: Sequence[int] = ()
    tree_parents: Sequence[int] = ()  # parents before children
    fed: int = 0  # tree nodes whose KV is in the pool already; then `pending` is empty
    logits: int = 1  # pending tokens whose logits are wanted, from the end; 0: not the nodes' either

    @property
    def tree_start(self) -> int:
        return self.start + len(self.pending)

    @property
    def wanted(self) -> int:
        """Rows of logits that this row gets."""
        nodes = len(self.tree_tokens) - self.fed if self.logits else 0
        return min(self.logits, len(self.pending)) + nodes


@dataclass(frozen=True, slots=True, order=True)
class StepSizes:
    tokens: int  # T
    rows: int  # R
    wanted: int  # N
    blocks: int  # NB, the width of the block table

    def fits(self, other: StepSizes) -> bool:
        """Whether it can be padded to the other."""
        return (
            self.tokens <= other.tokens
            and self.rows <= other.rows
            and self.wanted <= other.wanted
            and self.blocks <= other.blocks
        )

    @property
    def parts(self) -> list[int]:
        """Numbers in each part of `Step.flat`, in order."""
        return [*[self.tokens] * 5, self.rows + 1, self.rows, self.rows, self.wanted, self.rows * self.blocks]


@dataclass(frozen=True, slots=True)
class Step:
    """Packed rows. All tensors are views of `flat`, so that they reach a device in one transfer."""

    sizes: StepSizes
    flat: Tensor  # int64
    input_ids: Tensor  # [T]
    paged: PagedBatch
    wanted: Tensor  # [N] tokens whose logits are wanted

    @classmethod
    def of(cls, flat: Tensor, sizes: StepSizes) -> Step:
        ids, positions, visible, ancestors, slots, seqlens, lengths, starts, wanted, table = flat.split(
            sizes.parts
        )
        paged = PagedBatch(
            block_table=table.view(sizes.rows, sizes.blocks),
            cu_seqlens=seqlens,
            context_lens=lengths,
            tree_start=starts,
            positions=positions,
            visible=visible,
            ancestors=ancestors[:, None],
            slots=slots,
        )
        return cls(sizes, flat, ids, paged, wanted)

    def to(self, device: torch.device) -> Step:
        return Step.of(transfer(self.flat, device), self.sizes)

    def padded(self, sizes: StepSizes, nowhere: int) -> Step:
        """The same rows in larger tensors.

        What is added are rows without tokens, tokens of no row that see nothing and store their keys in slot
        `nowhere`, and further wishes for the first token's logits.
        """
        padded = Step.of(torch.zeros(sum(sizes.parts), dtype=torch.int64), sizes)
        own, larger = self.paged, padded.paged
        larger.slots[self.sizes.tokens :] = nowhere
        larger.cu_seqlens[self.sizes.rows + 1 :] = self.sizes.tokens
        larger.block_table[: self.sizes.rows, : self.sizes.blocks] = own.block_table
        pairs = [(self.input_ids, padded.input_ids), (self.wanted, padded.wanted)]
        names = ("positions", "visible", "ancestors", "slots", "cu_seqlens", "context_lens", "tree_start")
        pairs += [(getattr(own, name), getattr(larger, name)) for name in names]
        for source, target in pairs:
            target[: len(source)] = source
        return padded


def transfer(x: Tensor, device: torch.device) -> Tensor:
    """A small tensor of this machine on a device. Nobody waits: work queued there later finds it."""
    return pinned(x, device).to(device, non_blocking=True)


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """A copy where a transfer to a GPU need not wait for this machine; else the tensor itself."""
    return x.pin_memory() if device.type == "cuda" else x


def pack(rows: Sequence[Row], block_size: int) -> Step:
    """Pack rows in order, in this machine's memory. A row that cannot be packed is a ValueError: the caller's
    bookkeeping is wrong."""
    ids: list[int] = []
    positions: list[int] = []
    visible: list[int] = []
    ancestors: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    seqlens = [0]
    for row in rows:
        _check(row, block_size)
        depths, masks = _tree(row.tree_parents)
        nodes = range(row.fed, len(row.tree_tokens))
        chain = range(row.start, row.tree_start)
        end = len(ids) + len(chain) + (len(nodes) if row.logits else 0)
        wanted += range(end - row.wanted, end)
        ids += [*row.pending, *row.tree_tokens[row.fed :]]
        positions += [*chain, *(row.tree_start - 1 + depths[node] for node in nodes)]
        visible += [*(slot + 1 for slot in chain), *(row.tree_start for _ in nodes)]
        ancestors += [*(0 for _ in chain), *(masks[node] for node in nodes)]
        slots += [_physical(row, s, block_size) for s in (*chain, *(row.tree_start + node for node in nodes))]
        seqlens.append(len(ids))
    lengths = [row.tree_start + len(row.tree_tokens) for row in rows]
    starts = [row.tree_start for row in rows]
    blocks = max(len(row.blocks) for row in rows)
    table = [block for row in rows for block in (*row.blocks, *[0] * (blocks - len(row.blocks)))]
    flat = [*ids, *positions, *visible, *ancestors, *slots, *seqlens, *lengths, *starts, *wanted, *table]
    return Step.of(torch.tensor(flat), StepSizes(len(ids), len(rows), len(wanted), blocks))


def _check(row: Row, block_size: int) -> None:
    nodes, slots = len(row.tree_tokens), row.tree_start + len(row.tree_tokens)
    if nodes > MAX_TREE_NODES:
        raise ValueError(f"a draft tree holds at most {MAX_TREE_NODES} nodes, this one has {nodes}")
    if len(row.tree_parents) != nodes or not all(-1 <= p < i for i, p in enumerate(row.tree_parents)):
        raise ValueError(
            f"parents {list(row.tree_parents)} do not make a tree of {nodes} nodes, parents first"
        )
    if row.fed and row.pending:
        raise ValueError(f"{row.fed} nodes are fed already, so their root cannot be pending")
    if not row.pending and (row.fed >= nodes or not row.start):
        raise ValueError("a row needs a token to feed, and a tree needs a root")
    if len(row.blocks) * block_size < slots:
        raise ValueError(f"{len(row.blocks)} blocks of {block_size} slots cannot hold {slots} slots")


def _tree(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Depth and ancestor bits (as signed 64-bit integers) of each node, itself included."""
    depths: list[int] = []
    masks: list[int] = []
    for node, parent in enumerate(parents):
        depths.append(1 if parent < 0 else depths[parent] + 1)
        above = 0 if parent < 0 else masks[parent]
        masks.append(above | (1 << node if node < 63 else -(1 << 63)))
    return depths, masks


def _physical(row: Row, slot: int, block_size: int) -> int:
    return row.blocks[slot // block_size] * block_size + slot % block_size
