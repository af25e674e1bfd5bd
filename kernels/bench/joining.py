"""The second reduction of split attention by itself. What it joins is float32; splits are a power of two."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from gammaray.kernels.bench.case import BF16, LLAMA_3_8B, LLAMA_3_70B, Case, Heads, Ready

TOKENS, SPLITS = (1, 64), (8, 64)
TOLERANCE = 1e-2  # of the bfloat16 it is stored in


def cases(device: torch.device) -> Iterator[Case]:
    for heads in (LLAMA_3_8B, LLAMA_3_70B):
        for tokens in TOKENS:
            yield from (case(heads, tokens, splits, device) for splits in SPLITS)


def case(heads: Heads, tokens: int, splits: int, device: torch.device) -> Case:
    results = tokens * heads.query
    read = results * splits * (heads.size + 1) * 4
    return Case(
        kernel="merge",
        sizes={"model": heads.model, "tokens": tokens, "splits": splits},
        moved=read + results * heads.size * BF16,
        operations=0,
        memory=4 * read,
        tolerance=TOLERANCE,
        prepare=partial(_ready, heads, tokens, splits, device),
    )


def _ready(heads: Heads, tokens: int, splits: int, device: torch.device) -> Ready:
    from gammaray.kernels.fused.merge import merge

    found = torch.randn(tokens, heads.query, splits, heads.size, device=device)
    weight = torch.randn(tokens, heads.query, splits, device=device)  # log2 of what was summed
    out = torch.empty(tokens, heads.query, heads.size, device=device, dtype=torch.bfloat16)
    rows = torch.tensor([0, tokens], device=device)

    def run() -> Tensor:
        merge[tokens, heads.query](
            found,
            weight,
            out,
            rows,
            None,
            1,
            splits,
            SINKS=False,
            HEADS=heads.query,
            DV=heads.size,
            BLOCK_S=splits,
        )
        return out

    def error(joined: Tensor) -> float:
        shares = (weight * torch.tensor(2.0).log()).softmax(-1)  # [T, H, S]
        truth = (shares[..., None] * found).sum(2)
        return float((joined.float() - truth).abs().max() / truth.abs().max())

    return Ready(run, error)
