"""Paged tree attention: the canonical arguments, and which backend answers.

One step packs T tokens of R rows. Row r's keys lie in *logical slots* 0, 1, 2, ...: committed tokens first,
from `tree_start[r]` on the nodes of its draft tree. `block_table` maps logical slots to the pool's blocks.
A token sees the leading `visible` slots of its row and, beyond them, the tree nodes whose bit is set in
`ancestors` (itself included). Slots that nobody sees may hold anything, NaN too.

Steps may be padded to fixed sizes. A row without tokens is padding: it is never read but for `cu_seqlens`.
Tokens from cu_seqlens[R] on belong to no row: what they get is any number, or what was in memory.

`reference.py` is the truth. `cpu.py` is the fast torch path and `fused/` has the Triton kernels: `backend.py`
says which of the two answers. All give the same numbers. `paths.py` has `cpu.py` compute each token with the
same bits in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gammaray.kernels import cpu, paths
from gammaray.kernels.backend import backend
from gammaray.kernels.paths import AttentionSizes
from gammaray.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Where the keys of one step's rows lie and which of them each token sees. All int64.

    Tree nodes are numbered parents first, so the ancestors of a node, in bit order, are in order of depth.
    """

    block_table: Tensor  # [R, NB] block ids; entries past a row's last block are never read
    cu_seqlens: Tensor  # [R + 1] row r owns the tokens cu_seqlens[r] : cu_seqlens[r + 1]
    context_lens: Tensor  # [R] logical slots that hold keys once this step's are written
    tree_start: Tensor  # [R] logical slot of tree node 0
    positions: Tensor  # [T] position ids
    visible: Tensor  # [T] leading slots seen, >= 1
    ancestors: (
        Tensor  # [T, W] bit i % 64 of word i // 64: tree node i is seen; 0 for a token outside the tree
    )
    slots: Tensor  # [T] physical slot (block * block_size + offset) of each token's own key


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers with one window share in a step, so that it is computed once a step."""

    batch: PagedBatch
    window: int | None
    groups: cpu.Groups | None  # of the torch path; None: the fused kernel answers, from the batch itself
    workspace: Workspace


def plan_attention(
    batch: PagedBatch,
    block_size: int,
    dtype: torch.dtype,
    *,
    group_size: int = 1,
    window: int | None = None,
    sizes: AttentionSizes | None = None,
) -> AttentionPlan:
    """What `paged_tree_attention` needs. The torch path's masks and gather indices wait for the device.

    `group_size` is the number of query heads that share a key head. With a sliding `window` a token at
    position p sees only keys at positions above p - window. With `sizes` a token's result does not depend,
    to the bit, on what else is in the batch or on how it was drafted (see `paths.py`).
    """
    layout = cpu.Layout(block_size, dtype, group_size, window)
    if sizes is not None:
        return AttentionPlan(batch, window, paths.group(batch, layout, sizes), Workspace())
    if window is not None and window < 64 * batch.ancestors.shape[1]:
        batch = replace(batch, ancestors=_nearest(batch.ancestors, window))
    fused = backend(batch.positions.device) == "fused"
    return AttentionPlan(batch, window, None if fused else cpu.group(batch, layout), Workspace())


def paged_tree_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    plan: AttentionPlan,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention of q [T, H, D] over k_pool [B, block_size, Hkv, D], v_pool [B, block_size, Hkv, Dv].

    Scores are q.k * scaling, then softcap * tanh(score / softcap). `sinks` [H] adds one logit per head to
    the softmax's denominator. Returns [T, H, Dv] in q's dtype. The step's keys must be in the pool already.
    """
    if q.shape[1] % k_pool.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k_pool.shape[2]} key heads evenly")
    if plan.groups is not None:
        return cpu.paged_tree_attention(q, k_pool, v_pool, plan.groups, scaling, softcap, sinks)
    from gammaray.kernels.fused import launch

    scores = launch.Scores(scaling, plan.window, softcap, sinks)
    return launch.paged_tree_attention(q, k_pool, v_pool, plan.batch, scores, plan.workspace)


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Store k [T, Hkv, D] and v [T, Hkv, Dv] in the physical `slots` [T] of one layer's pools."""
    k_pool.flatten(0, 1).index_copy_(0, slots, k)
    v_pool.flatten(0, 1).index_copy_(0, slots, v)


def move_kv(k_pool: Tensor, v_pool: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy slots `src` to `dst` [N] in k_pool [L, B, block_size, Hkv, D] and v_pool; they may overlap."""
    if backend(src.device) == "fused":
        from gammaray.kernels.fused import move

        if len(src) <= move.MOST:
            return move.move_kv(k_pool, v_pool, src, dst)
    for pool in (k_pool, v_pool):
        flat = pool.flatten(1, 2)
        flat.index_copy_(1, dst, flat.index_select(1, src))


def _nearest(ancestors: Tensor, window: int) -> Tensor:
    """Keep the `window` highest set bits of each mask: the nearest ancestors, the node itself included."""
    bit = torch.arange(64, device=ancestors.device)
    bits = (ancestors[:, :, None] >> bit) & 1  # [T, W, 64]
    rank = bits.flatten(1).flip(1).cumsum(1).flip(1)  # 1 for the node itself, 2 for its parent, ...
    kept = bits * (rank <= window).view_as(bits)
    return (kept << bit).sum(2)
