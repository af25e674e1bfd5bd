"""Rotation and KV write against the formula in float64; what is not written must stay as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gammaray.kernels.fused.rope import rotate_and_write

BLOCKS, BLOCK_SIZE = 3, 4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Case:
    """Random qkv and angles, and pools full of NaN."""

    def __init__(self, tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(tokens * heads * dim)
        self.heads, self.kv_heads = heads, kv_heads
        self.qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
        angles = torch.rand(tokens, dim // 2, generator=generator, dtype=torch.float64) * 6.3
        self.cos = torch.cat([angles.cos()] * 2, 1).to(dtype)
        self.sin = torch.cat([-angles.sin(), angles.sin()], 1).to(dtype)
        shape = (2, BLOCKS, BLOCK_SIZE, kv_heads, dim)
        self.k_pool, self.v_pool = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))

    @property
    def turned(self) -> Tensor:
        """[T, H + Hkv, D] float64: a rotation of each pair (i, i + D/2)."""
        x = self.qkv[:, : self.heads + self.kv_heads].double()
        half = x.shape[2] // 2
        cos, sin = self.cos.double()[:, None, :half], self.sin.double()[:, None, half:]
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def run(self, slots: list[int], qk: Tensor | None = None) -> Tensor:
        turning = self.heads + self.kv_heads
        q = torch.full_like(self.qkv[:, : self.heads], float("nan"), memory_format=torch.contiguous_format)
        return rotate_and_write(
            self.qkv[:, :turning] if qk is None else qk,
            self.qkv[:, turning:],
            self.cos,
            self.sin,
            torch.tensor(slots),
            self.k_pool[1],  # of the second of two layers
            self.v_pool[1],
            q,
        )

    def check(self, slots: list[int], q: Tensor) -> None:
        tolerance = TOLERANCE[q.dtype]
        turned, values = self.turned, self.qkv[:, self.heads + self.kv_heads :]
        torch.testing.assert_close(q.double(), turned[:, : self.heads], rtol=tolerance, atol=tolerance)
        k, v = (pool[1].flatten(0, 1) for pool in (self.k_pool, self.v_pool))
        written = [slot for slot in slots if slot >= 0]
        real = [token for token, slot in enumerate(slots) if slot >= 0]
        torch.testing.assert_close(
            k[written].double(), turned[real, self.heads :], rtol=tolerance, atol=tolerance
        )
        assert torch.equal(v[written], values[real])
        others = [slot for slot in range(BLOCKS * BLOCK_SIZE) if slot not in written]
        for pool in (self.k_pool, self.v_pool):
            assert pool[0].isnan().all() and pool[1].flatten(0, 1)[others].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [
        (9, 3, 64),  # SmolLM2: heads end, and keys begin, within a program
        (8, 8, 16),  # as many key heads
        (8, 1, 20),  # one, and a dimension that is no power of two
    ],
)
def test_rotated_and_written(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Catches a wrong pair or sign, heads mixed up, and slots of another block or layer."""
    case = Case(4, heads, kv_heads, dim, dtype)
    slots = [5, 0, 11, 6]
    case.check(slots, case.run(slots))


def test_tokens_that_pad_write_nothing() -> None:
    """Catches a padded token that lands in the slot before the pool's first."""
    case = Case(5, 4, 2, 16, torch.float32)
    slots = [3, -1, 7, -1, -1]
    case.check(slots, case.run(slots))


def test_queries_and_keys_from_elsewhere() -> None:
    """Catches the projection's stride where Qwen3's normalised heads lie in a tensor of their own."""
    case = Case(3, 4, 2, 16, torch.float32)
    qk = case.qkv[:, :6].contiguous()
    case.qkv[:, :6] *= float("nan")
    q = case.run([1, 2, 3], qk)
    case.qkv[:, :6] = qk
    case.check([1, 2, 3], q)
