"""Steps with chains and draft trees of any size, their pools, and NaN wherever nobody looks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gammaray.kernels import reference
from gammaray.kernels.api import PagedBatch

NAN = float("nan")


@dataclass(frozen=True)
class Seq:
    """A row: `pending` tokens after `past` ones with keys, then the nodes of a tree from `fed` on."""

    past: int
    pending: int = 1
    parents: tuple[int, ...] = ()  # of the tree's nodes, -1: the last pending token
    fed: int = 0

    @property
    def tree_start(self) -> int:
        return self.past + self.pending

    @property
    def length(self) -> int:
        return self.tree_start + len(self.parents)


def random_tree(nodes: int, seed: int) -> tuple[int, ...]:
    """Deep branches and wide ones."""
    rng = random.Random(seed)
    return tuple(rng.choice([node - 1, rng.randrange(-1, node)]) for node in range(nodes))


def batch_of(
    rows: Sequence[Seq],
    block_size: int = 4,
    words: int = 1,
    *,
    idle_rows: int = 0,
    idle_tokens: int = 0,
    seed: int = 0,
) -> PagedBatch:
    """Blocks lie in random order. Idle rows and tokens pad: no kernel may follow what their numbers say."""
    wild = 2**40
    width = max(-(-row.length // block_size) for row in rows)
    free = list(range(len(rows) * width))
    random.Random(seed).shuffle(free)
    table = torch.full((len(rows) + idle_rows, width), wild)
    positions: list[int] = []
    visible: list[int] = []
    ancestors: list[list[int]] = []
    seqlens = [0]
    for index, row in enumerate(rows):
        blocks = -(-row.length // block_size)
        table[index, :blocks] = torch.tensor([free.pop() for _ in range(blocks)])
        depths, masks = [], []
        for node, parent in enumerate(row.parents):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            masks.append((0 if parent < 0 else masks[parent]) | 1 << node)
        nodes = range(row.fed, len(row.parents))
        positions += [*range(row.past, row.tree_start), *(row.tree_start + depths[node] for node in nodes)]
        visible += [*range(row.past + 1, row.tree_start + 1), *[row.tree_start] * len(nodes)]
        ancestors += [[0] * words] * row.pending + [_words(masks[node], words) for node in nodes]
        seqlens.append(len(positions))
    idle = [wild] * idle_tokens
    return PagedBatch(
        block_table=table,
        cu_seqlens=torch.tensor(seqlens + [len(positions)] * idle_rows),
        context_lens=torch.tensor([row.length for row in rows] + [wild] * idle_rows),
        tree_start=torch.tensor([row.tree_start for row in rows] + [wild] * idle_rows),
        positions=torch.tensor(positions + idle),
        visible=torch.tensor(visible + idle),
        ancestors=torch.tensor(ancestors + [[-1] * words] * idle_tokens),
        slots=torch.zeros(len(positions) + idle_tokens, dtype=torch.int64),
    )


def pools_of(
    batch: PagedBatch, kv_heads: int, dims: tuple[int, int], block_size: int, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Random keys and values in float64, NaN in every slot that no token sees."""
    seen = set()
    for row, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        for token in range(int(start), int(end)):
            logical = reference._seen(batch, row, token, window)
            seen.update(reference._physical(batch, row, logical, block_size))
    blocks = batch.block_table.numel()
    unseen = [slot for slot in range(blocks * block_size) if slot not in seen]
    generator = torch.Generator().manual_seed(1)
    pools = []
    for dim in dims:
        pool = torch.randn(blocks * block_size, kv_heads, dim, generator=generator, dtype=torch.float64)
        pool[unseen] = NAN
        pools.append(pool.view(blocks, block_size, kv_heads, dim))
    return pools[0], pools[1]


def _words(mask: int, words: int) -> list[int]:
    """Little end first, signed as int64 is."""
    parts = [mask >> 64 * i & 2**64 - 1 for i in range(words)]
    return [part - 2**64 if part >> 63 else part for part in parts]
