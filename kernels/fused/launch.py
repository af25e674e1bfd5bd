"""Launches paged tree attention: picks the tile and the splits, and joins the splits.

A launch is decided by sizes, never by what the tensors hold. So it waits for nothing, and can be captured in
a CUDA graph for a bucket of sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from gammaray.kernels import tuning
from gammaray.kernels.fused.attention import REGISTERS, attend
from gammaray.kernels.fused.merge import merge
from gammaray.kernels.trial import chain_batch, random_pools
from gammaray.kernels.tuning import Case, Tile, Tuner
from gammaray.kernels.workspace import Workspace

if TYPE_CHECKING:
    from gammaray.kernels.api import PagedBatch

Launch = Callable[[], Any]
TRIAL_SEQUENCES, TRIAL_CONTEXT, TRIAL_KV_HEADS = 16, 1024, 8  # 64 MiB of keys in bfloat16 at head size 128


@dataclass(frozen=True, slots=True)
class Scores:
    """How q.k becomes a weight: see `gammaray.kernels.api.paged_tree_attention`."""

    scaling: float
    window: int | None = None  # of the prefix: `ancestors` are cut to it already
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]


def paged_tree_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: PagedBatch,
    scores: Scores,
    workspace: Workspace,
    *,
    tile: Tile | None = None,
    splits: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `gammaray.kernels.api.paged_tree_attention`. `out` [T, H, Dv]; None: a new tensor."""
    tokens, heads, dim = q.shape
    block_size, kv_heads, v_dim = k_pool.shape[1], k_pool.shape[2], v_pool.shape[3]
    group, rows = heads // kv_heads, len(batch.cu_seqlens) - 1
    if tile is None:
        tile = _choose(q, max(dim, v_dim), group, rows)
    blocks = tokens // (tile.block_m // group) + rows
    if splits is None:
        longest = _longest(batch, block_size, scores.window)
        splits = tuning.splits(blocks * kv_heads, longest, _multiprocessors(q.device))
    if out is None:
        out = q.new_empty(tokens, heads, v_dim)
    found, weight = out, None
    if splits > 1:
        wide = torch.promote_types(q.dtype, torch.float32)
        memory = workspace.take((tokens * heads * splits * (v_dim + 1),), wide, q.device)
        found, weight = memory.split([tokens * heads * splits * v_dim, tokens * heads * splits])
    with torch.cuda.device_of(q):
        attend[(blocks, kv_heads, splits)](
            q.contiguous(),
            k_pool,
            v_pool,
            found,
            weight,
            batch.block_table,
            batch.cu_seqlens,
            batch.context_lens,
            batch.tree_start,
            batch.positions,
            batch.visible,
            batch.ancestors,
            scores.sinks,
            rows,
            batch.block_table.shape[1],
            SCALING=scores.scaling,
            SOFTCAP=scores.softcap,
            WINDOW=scores.window,
            SINKS=scores.sinks is not None,
            SPLIT=splits > 1,
            KV_HEADS=kv_heads,
            GROUP=group,
            D=dim,
            DV=v_dim,
            PAGE=block_size,
            WORDS=batch.ancestors.shape[1],
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            num_warps=tile.warps,
            num_stages=tile.stages,
            maxnreg=REGISTERS,
        )
        if splits > 1:
            merge[(tokens, heads)](
                found,
                weight,
                out,
                batch.cu_seqlens,
                scores.sinks,
                rows,
                splits,
                SINKS=scores.sinks is not None,
                HEADS=heads,
                DV=v_dim,
                BLOCK_S=triton.next_power_of_2(splits),
            )
    return out


def _longest(batch: PagedBatch, block_size: int, window: int | None) -> int:
    """Slots that a query reads at most."""
    longest = batch.block_table.shape[1] * block_size
    return longest if window is None else min(longest, window + 64 * batch.ancestors.shape[1])


def _choose(q: Tensor, head_dim: int, group: int, rows: int) -> Tile:
    dtype = str(q.dtype).removeprefix("torch.")
    case = Case(*_device(q.device), dtype, head_dim, group, tuning.query_rows(len(q), rows, group))
    measurable = q.is_cuda and not torch.cuda.is_current_stream_capturing()
    return _tuner().choose(case, partial(measure, case, q.device) if measurable else None)


def measure(
    case: Case, device: torch.device, tile: Tile, bench: Callable[[Launch], float] = do_bench
) -> float:
    """Milliseconds that a step of such a case takes, in one split; infinite where it cannot run."""
    try:
        return bench(trial(case, device, tile))
    except (OutOfResources, torch.OutOfMemoryError):
        return float("inf")


def trial(
    case: Case,
    device: torch.device,
    tile: Tile,
    sequences: int = TRIAL_SEQUENCES,
    context: int = TRIAL_CONTEXT,
    kv_heads: int = TRIAL_KV_HEADS,
) -> Launch:
    """A made-up step of this case."""
    dtype, block_size = getattr(torch, case.dtype), 16
    batch = chain_batch(sequences, max(1, case.rows // case.group), context, block_size, device)
    q = torch.randn(len(batch.positions), kv_heads * case.group, case.head_dim, device=device).to(dtype)
    k_pool, v_pool = random_pools(batch.block_table.numel(), block_size, kv_heads, case.head_dim, q)
    scores = Scores(case.head_dim**-0.5)
    return partial(paged_tree_attention, q, k_pool, v_pool, batch, scores, Workspace(), tile=tile, splits=1)


@cache
def _tuner() -> Tuner:
    """Choices hold for this Triton and this text of the kernel."""
    digest = hashlib.sha256(Path(__file__).with_name("attention.py").read_bytes())
    return Tuner(tuning.cache_file(), f"triton {triton.__version__}, kernel {digest.hexdigest()[:16]}")


@cache
def _device(device: torch.device) -> tuple[str, int]:
    """Name and compute capability, times ten."""
    if device.type != "cuda":
        return device.type, 0
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), 10 * major + minor


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
