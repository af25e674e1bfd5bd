"""Paged tree attention as the definition says it, one token and one head at a time. The truth for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from gammaray.kernels.api import PagedBatch


def paged_tree_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: PagedBatch,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `gammaray.kernels.api.paged_tree_attention`; computed in float32, or in q's type if that is wider.

    Tokens that belong to no row get zeros.
    """
    heads, group_size = q.shape[1], q.shape[1] // k_pool.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape[0], heads, v_pool.shape[3], dtype=wide, device=q.device)
    for row in range(len(batch.cu_seqlens) - 1):
        for token in range(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])):
            slots = _physical(batch, row, _seen(batch, row, token, window), k_pool.shape[1])
            for head in range(heads):
                keys = k_pool.flatten(0, 1)[slots, head // group_size].to(wide)  # [S, D]
                values = v_pool.flatten(0, 1)[slots, head // group_size].to(wide)  # [S, Dv]
                sink = None if sinks is None else sinks[head].to(wide)
                weights = _softmax(keys @ q[token, head].to(wide) * scaling, softcap, sink)
                out[token, head] = weights @ values
    return out.to(q.dtype)


def _seen(batch: PagedBatch, row: int, token: int, window: int | None) -> list[int]:
    """Logical slots that a token sees: a prefix by position, then its ancestors by depth."""
    tree_start, position = int(batch.tree_start[row]), int(batch.positions[token])
    words = batch.ancestors[token].tolist()
    nodes = [64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1]
    places = [(slot, slot) for slot in range(int(batch.visible[token]))]  # (slot, position)
    places += [(tree_start + node, tree_start + depth) for depth, node in enumerate(nodes)]
    return [slot for slot, at in places if window is None or at > position - window]


def _physical(batch: PagedBatch, row: int, slots: list[int], block_size: int) -> list[int]:
    table = batch.block_table[row].tolist()
    return [table[slot // block_size] * block_size + slot % block_size for slot in slots]


def _softmax(scores: Tensor, softcap: float | None, sink: Tensor | None) -> Tensor:
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sink is None:
        return torch.softmax(scores, 0)
    return torch.softmax(torch.cat([scores, sink[None]]), 0)[:-1]
