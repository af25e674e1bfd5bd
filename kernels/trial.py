"""Made-up steps to time attention on, or to check it."""

from __future__ import annotations

import torch
from torch import Tensor

from gammaray.kernels.api import PagedBatch


def chain_batch(
    sequences: int, queries: int, context: int, block_size: int, device: torch.device
) -> PagedBatch:
    """Sequences that each feed the last `queries` of `context` tokens. Their blocks lie in random order."""
    blocks = -(-context // block_size)
    order = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(0))
    table = order.view(sequences, blocks).to(device)  # [R, NB]
    lengths = torch.full((sequences,), context, device=device)
    positions = torch.arange(context - queries, context, device=device).repeat(sequences)  # [T]
    owner = torch.arange(sequences, device=device).repeat_interleave(queries)  # [T]
    return PagedBatch(
        block_table=table,
        cu_seqlens=torch.arange(sequences + 1, device=device) * queries,
        context_lens=lengths,
        tree_start=lengths,
        positions=positions,
        visible=positions + 1,
        ancestors=torch.zeros(len(positions), 1, dtype=torch.int64, device=device),
        slots=table[owner, positions // block_size] * block_size + positions % block_size,
    )


def random_pools(
    blocks: int, block_size: int, kv_heads: int, dim: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values [blocks, block_size, kv_heads, dim] of `like`'s type, on its device."""
    size = blocks, block_size, kv_heads, dim
    k, v = (torch.randn(size, device=like.device).to(like.dtype) for _ in range(2))
    return k, v
