"""KV moves of accepted nodes in all layers, and rotary embedding with the KV write, for Llama 3."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from gammaray.kernels.bench.case import BF16, LLAMA_3_8B, LLAMA_3_70B, Case, Heads, Ready

LAYERS = ((LLAMA_3_8B, 32), (LLAMA_3_70B, 80))
MOVED = (1, 8, 128, 512)  # slots in one step
TOKENS = (1, 8, 128, 512, 2048)
PAGE, PAGES = 16, 128
EXACT, TOLERANCE = 0.0, 2e-2


def cases(device: torch.device) -> Iterator[Case]:
    for heads, layers in LAYERS:
        yield from (move_case(heads, layers, slots, device) for slots in MOVED)
        yield from (rope_case(heads, tokens, device) for tokens in TOKENS)


def move_case(heads: Heads, layers: int, slots: int, device: torch.device) -> Case:
    number = layers * heads.key * heads.size * BF16  # bytes of a slot's keys
    return Case(
        kernel="move",
        sizes={"model": heads.model, "layers": layers, "slots": slots},
        moved=2 * slots * 2 * number,
        operations=0,
        memory=2 * PAGE * PAGES * number,
        tolerance=EXACT,
        prepare=partial(_move, heads, layers, slots, device),
    )


def _move(heads: Heads, layers: int, slots: int, device: torch.device) -> Ready:
    from gammaray.kernels.fused.move import move_kv

    shape = (layers, PAGES, PAGE, heads.key, heads.size)
    k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    src, dst = torch.randperm(PAGES * PAGE, device=device)[: 2 * slots].view(2, slots)  # apart: runs repeat

    def run() -> Tensor:
        move_kv(k, v, src, dst)
        return k

    def error(_: Tensor) -> float:
        flat = [pool.flatten(1, 2) for pool in (k, v)]
        return max(float((pool[:, src] - pool[:, dst]).abs().max()) for pool in flat)

    return Ready(run, error)


def rope_case(heads: Heads, tokens: int, device: torch.device) -> Case:
    numbers = (heads.query + 2 * heads.key) * heads.size
    return Case(
        kernel="rope",
        sizes={"model": heads.model, "tokens": tokens},
        moved=tokens * (2 * numbers + 2 * heads.size) * BF16,
        operations=0,
        memory=(3 * tokens * numbers + 4 * tokens * heads.key * heads.size) * BF16,
        tolerance=TOLERANCE,
        prepare=partial(_rope, heads, tokens, device),
    )


def _rope(heads: Heads, tokens: int, device: torch.device) -> Ready:
    from gammaray.kernels.fused.rope import rotate_and_write

    randn = partial(torch.randn, device=device, dtype=torch.bfloat16)
    qk, v = randn(tokens, heads.query + heads.key, heads.size), randn(tokens, heads.key, heads.size)
    cos, sin = randn(tokens, heads.size), randn(tokens, heads.size)
    pages = -(-tokens // PAGE)
    k_pool, v_pool = (randn(pages, PAGE, heads.key, heads.size) for _ in range(2))
    slots = torch.randperm(pages * PAGE, device=device)[:tokens]
    q = randn(tokens, heads.query, heads.size)
    run = partial(rotate_and_write, qk, v, cos, sin, slots, k_pool, v_pool, q)

    def error(rotated: Tensor) -> float:
        x = qk.float()
        truth = x * cos.float()[:, None] + x.roll(heads.size // 2, -1) * sin.float()[:, None]
        got = torch.cat([rotated, k_pool.flatten(0, 1)[slots]], 1).float()
        wrong = float((v_pool.flatten(0, 1)[slots] - v).abs().max())
        return wrong + float((got - truth).abs().max() / truth.abs().max())

    return Ready(run, error)
