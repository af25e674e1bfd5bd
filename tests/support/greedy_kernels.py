"""Kernels that take more of a GPU than it has, and one that is fine, for the compile gate to tell apart."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from gammaray.kernels.fused.variant import Variant


@triton.jit
def _product(
    x_ptr: tl.tensor, y_ptr: tl.tensor, out_ptr: tl.tensor, n: tl.tensor, M: tl.constexpr, K: tl.constexpr
) -> None:
    """out [M, M] += x [M, n * K] @ y [n * K, M], all contiguous."""
    rows, inner = tl.arange(0, M), tl.arange(0, K)
    acc = tl.zeros([M, M], tl.float32)
    for k in range(n):
        x = tl.load(x_ptr + rows[:, None] * n * K + k * K + inner[None, :])
        y = tl.load(y_ptr + (k * K + inner)[:, None] * M + rows[None, :])
        acc += tl.dot(x, y)
    tl.store(out_ptr + rows[:, None] * M + rows[None, :], acc)


@triton.jit
def _unbound(x_ptr: tl.tensor) -> None:
    tl.store(x_ptr, not_defined)  # noqa: F821


def variants() -> Iterator[Variant]:
    signature = {"x_ptr": "*bf16", "y_ptr": "*bf16", "out_ptr": "*fp32", "n": "i32"}
    yield Variant("fine", _product, signature, {"M": 32, "K": 32}, warps=4, stages=2)
    yield Variant("spills", _product, signature, {"M": 128, "K": 32}, warps=1, stages=1)
    yield Variant("shared", _product, signature, {"M": 128, "K": 128}, warps=8, stages=5)
    yield Variant("broken", _unbound, {"x_ptr": "*fp32"}, {})
