"""Paged tree attention in a few large torch calls.

Rows of similar shape are padded into one group, gathered slot by slot and answered by one SDPA call. The
query heads that share a key head become further query rows of it ("folding"): on CPUs that is faster than
SDPA's own grouped heads while a row has few queries. Padding repeats slots and queries that exist, so what
nobody wrote is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from gammaray.kernels.api import PagedBatch

CALL_COST = 400  # the fixed cost of one more SDPA call, in key slots (measured: about 40 us)
FOLD_LIMIT = 64  # queries a row, all heads of a key head together, up to which folding wins


@dataclass(frozen=True, slots=True)
class Layout:
    """What masks and indices depend on besides the rows."""

    block_size: int
    dtype: torch.dtype
    group_size: int  # query heads that share a key head
    window: int | None


@dataclass(frozen=True, slots=True)
class Group:
    """R rows padded to Q queries and S keys each."""

    rows: int
    tokens: Tensor | None  # [R * Q] index into the step's tokens; None: all of them, in order
    slots: Tensor | range  # [R * S] physical slots
    fold: bool
    bias: Tensor | None  # [R, 1, Q or group_size * Q, S] 0 or -inf; None: everything is seen


@dataclass(frozen=True, slots=True)
class Groups:
    groups: tuple[Group, ...]
    order: Tensor | None  # [T] where each token's result lies among the groups' results; None: in order


def group(batch: PagedBatch, layout: Layout) -> Groups:
    """Group the rows of a step and build each group's indices and mask. Rows without tokens have no part."""
    if layout.window is None and is_lone(batch):
        return Groups((_lone(batch, layout),), None)
    starts, contexts, device = batch.cu_seqlens.tolist(), batch.context_lens.tolist(), batch.positions.device
    queries = [end - start for start, end in pairwise(starts)]
    busy = [row for row, count in enumerate(queries) if count]
    grouped = group_rows([queries[row] for row in busy], [contexts[row] for row in busy])
    members = [[busy[i] for i in rows] for rows in grouped]
    padded = [_pad(rows, starts, queries) for rows in members]
    fed = [token for tokens in padded for token in tokens]
    in_order = fed == list(range(len(batch.positions)))
    parts = []
    for rows, tokens in zip(members, padded, strict=True):
        part = _group(batch, torch.tensor(rows, device=device), torch.tensor(tokens, device=device), layout)
        parts.append(replace(part, tokens=None) if in_order and len(members) == 1 else part)
    return Groups(tuple(parts), None if in_order else order(fed, len(batch.positions)).to(device))


def group_rows(queries: Sequence[int], contexts: Sequence[int]) -> list[list[int]]:
    """Rows that share one padded call, cheapest by a simple cost model; large rows end up alone."""
    groups: list[list[int]] = []
    shape = (0, 0)
    for row in sorted(range(len(queries)), key=lambda r: (queries[r], contexts[r], r)):
        merged = (max(shape[0], queries[row]), max(shape[1], contexts[row]))
        if groups:
            size = len(groups[-1])
            apart = _cost(size, *shape) + _cost(1, queries[row], contexts[row])
            if _cost(size + 1, *merged) <= apart:
                groups[-1].append(row)
                shape = merged
                continue
        groups.append([row])
        shape = (queries[row], contexts[row])
    return [sorted(rows) for rows in groups]


def folds(queries: int, group_size: int) -> bool:
    """Whether a row of so many queries has the heads of a key head folded into further queries."""
    return group_size > 1 and queries * group_size <= FOLD_LIMIT


def paged_tree_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    groups: Groups,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `gammaray.kernels.api.paged_tree_attention`."""
    results = []
    for part in groups.groups:
        own = q if part.tokens is None else q.index_select(0, part.tokens)
        k, v = _gather(k_pool, part), _gather(v_pool, part)
        if softcap is None and sinks is None:
            results.append(sdpa(own, k, v, part, scaling))
        else:
            results.append(_manual(own, k, v, part, scaling, softcap, sinks))
    result = results[0] if len(results) == 1 else torch.cat(results)
    return result if groups.order is None else result.index_select(0, groups.order)


def _gather(pool: Tensor, part: Group) -> Tensor:
    """One group's keys or values, [R, Hkv, S, D]; a view of the pool where they lie in one run."""
    flat = pool.flatten(0, 1)  # [B * block_size, Hkv, D]
    if isinstance(part.slots, range):
        found = flat[part.slots.start : part.slots.stop]
    else:
        found = flat.index_select(0, part.slots)
    return found.view(part.rows, -1, *pool.shape[2:]).transpose(1, 2)


def _cost(rows: int, queries: int, keys: int) -> float:
    return CALL_COST + rows * keys * (1 + queries / 4)


def _pad(rows: list[int], starts: list[int], queries: list[int]) -> list[int]:
    """The tokens of each row, its last one repeated until all rows have equally many."""
    most = max(queries[row] for row in rows)
    return [starts[row] + min(i, queries[row] - 1) for row in rows for i in range(most)]


def order(fed: list[int], tokens: int) -> Tensor:
    """Where each token's result lies, given the tokens that were fed. For others, any place."""
    order = [0] * tokens
    for place, token in enumerate(fed):
        order[token] = place
    return torch.tensor(order)


def _group(batch: PagedBatch, rows: Tensor, tokens: Tensor, layout: Layout) -> Group:
    slots = _slots(batch, rows, layout.block_size)  # [R, S]
    tokens = tokens.view(len(rows), -1)  # [R, Q]
    fold = folds(tokens.shape[1], layout.group_size)
    seen = _seen(batch, rows, tokens[:, :, None], slots.shape[1], layout.window)  # [R, Q, S]
    bias = None
    if not bool(seen.all()):
        bias = torch.zeros(seen.shape, dtype=layout.dtype, device=seen.device)
        bias = bias.masked_fill_(~seen, float("-inf"))[:, None]
        bias = bias.repeat(1, 1, layout.group_size, 1) if fold else bias
    return Group(len(rows), tokens.flatten(), _run(slots.flatten()), fold, bias)


def is_lone(batch: PagedBatch) -> bool:
    """Whether there is one token of one row, which sees all of it: in plain decoding, or as a chain's end."""
    if len(batch.positions) != 1 or batch.cu_seqlens.tolist() != [0, 1]:
        return False
    context, visible = int(batch.context_lens[0]), int(batch.visible[0])
    if visible >= context:
        return True
    words = batch.ancestors[0].tolist()  # [W]
    seen = sum((word % 2**64) << 64 * place for place, word in enumerate(words))
    nodes = context - (start := int(batch.tree_start[0]))
    return visible >= start and seen == (1 << nodes) - 1


def _lone(batch: PagedBatch, layout: Layout) -> Group:
    """Of such a token: no mask, and no tensors to make one from."""
    context, size = int(batch.context_lens[0]), layout.block_size
    blocks = batch.block_table[0, : -(-context // size)]  # [NB]
    numbers, fold = blocks.tolist(), folds(1, layout.group_size)
    first = numbers[0]
    if numbers == list(range(first, first + len(numbers))):
        return Group(1, None, range(first * size, first * size + context), fold, None)
    inside = torch.arange(size, device=blocks.device)
    return Group(1, None, (blocks[:, None] * size + inside).flatten()[:context], fold, None)


def _slots(batch: PagedBatch, rows: Tensor, block_size: int) -> Tensor:
    """Physical slots [R, S] of each row's keys, padded with the row's slot 0, which is always written."""
    lengths = batch.context_lens[rows, None]
    logical = torch.arange(int(lengths.max()), device=lengths.device)
    logical = torch.where(logical < lengths, logical, 0)
    return batch.block_table[rows].gather(1, logical // block_size) * block_size + logical % block_size


def _run(slots: Tensor) -> Tensor | range:
    """A range where slots follow one another, which needs no gathering."""
    first, count = int(slots[0]), len(slots)
    if int(slots[-1]) - first == count - 1 and bool((slots.diff() == 1).all()):
        return range(first, first + count)
    return slots


def _seen(batch: PagedBatch, rows: Tensor, tokens: Tensor, longest: int, window: int | None) -> Tensor:
    """Which keys each of the padded queries [R, Q, 1] sees, [R, Q, S] bool."""
    slot = torch.arange(longest, device=tokens.device)
    seen = slot < batch.visible[tokens]
    if window is not None:
        seen &= slot > batch.positions[tokens] - window
    ancestors = batch.ancestors[tokens]  # [R, Q, 1, W]
    if bool(ancestors.any()):
        for i, word in enumerate(ancestors.unbind(3)):
            node = slot - batch.tree_start[rows, None, None] - 64 * i  # [R, 1, S]
            bit = (word >> node.clamp(0, 63)) & 1
            seen |= (node >= 0) & (node < 64) & (bit == 1)
    return seen


def sdpa(q: Tensor, k: Tensor, v: Tensor, part: Group, scaling: float) -> Tensor:
    """q [R * Q, H, D], k [R, Hkv, S, D], v [R, Hkv, S, Dv] of one group -> [R * Q, H, Dv]."""
    heads = q.shape[1]
    if not part.fold:
        q = q.reshape(part.rows, -1, heads, q.shape[2]).transpose(1, 2)  # [R, H, Q, D]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=part.bias, scale=scaling, enable_gqa=heads != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1)  # [R * Q, H, Dv]
    out = F.scaled_dot_product_attention(_fold(q, part.rows, k.shape[1]), k, v, part.bias, scale=scaling)
    return _unfold(out, heads)


def _manual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: Group,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax by hand in float32: SDPA knows neither softcap nor sinks."""
    heads, kv_heads = q.shape[1], k.shape[1]
    scores = _fold(q, part.rows, kv_heads).float() @ k.float().transpose(2, 3) * scaling  # [R, Hkv, G * Q, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(part.rows, kv_heads, heads // kv_heads, -1, k.shape[2])  # [R, Hkv, G, Q, S]
    if part.bias is not None:
        scores = scores + part.bias.view(part.rows, 1, -1, *scores.shape[3:])
    if sinks is not None:
        column = sinks.float().view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[2]].flatten(2, 3)
    return _unfold((weights @ v.float()).to(q.dtype), heads)


def _fold(q: Tensor, rows: int, kv_heads: int) -> Tensor:
    """[R * Q, H, D] -> [R, Hkv, G * Q, D]: row g * Q + i is query i of the g-th head of a key head."""
    _, heads, dim = q.shape
    q = q.reshape(rows, -1, kv_heads, heads // kv_heads, dim)
    return q.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)


def _unfold(out: Tensor, heads: int) -> Tensor:
    """[R, Hkv, G * Q, Dv] -> [R * Q, H, Dv]."""
    rows, kv_heads, _, dim = out.shape
    out = out.reshape(rows, kv_heads, heads // kv_heads, -1, dim)
    return out.permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)
