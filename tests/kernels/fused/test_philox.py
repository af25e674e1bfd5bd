"""The stream inside kernels against `kernels/philox.py`.

Catches: halves of the seed exchanged or sign-extended, words of a block in another order, a counter field
left out, and noise that loses the small u.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from gammaray.kernels.fused import philox
from gammaray.kernels.philox import NoiseKeys, Purpose, gumbel, uniform

SIZE = 64


@triton.jit
def _kernel(out, low, high, position, sequence, lane, first, SIZE: tl.constexpr):
    seed = philox.seed_of(tl.load(low), tl.load(high))
    at = tl.arange(0, SIZE)
    noise = philox.gumbel_tile(seed, first, tl.load(position), tl.load(sequence), tl.load(lane), SIZE)
    tl.store(out + at, noise)
    for i in range(SIZE):
        u = philox.uniform_at(seed, first + i, tl.load(position), tl.load(sequence), tl.load(lane))
        tl.store(out + SIZE + i, u)


@triton.jit
def _gumbel(u, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, philox.gumbel(tl.load(u + at)))


def word(value: int) -> torch.Tensor:
    return torch.tensor([value & 0xFFFFFFFF], dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize(
    ("seed", "sequence", "position", "purpose", "rank", "first"),
    [
        (0, 0, 0, Purpose.TARGET, 0, 0),
        (1, 2, 3, Purpose.ACCEPT, 4, 0),
        (2**31, 0, 2**31 - 1, Purpose.RESIDUAL, 0, 4096),
        (2**63, 1, 5, Purpose.DRAFT, 63, 64),
        (2**64 - 1, 2**31, 131072, Purpose.TARGET, 0, 262080),
        (0xFEDCBA9876543210, 7, 1, Purpose.RESIDUAL, 2**23, 8),
    ],
)
def test_the_stream_is_the_same(seed, sequence, position, purpose, rank, first):
    out = torch.empty(2 * SIZE)
    words = [word(x) for x in (seed, seed >> 32, position, sequence, purpose + 256 * rank)]
    _kernel[(1,)](out, *words, first, SIZE=SIZE)
    keys = NoiseKeys.build([seed], [sequence], [position], purpose, [rank])
    assert torch.equal(out[SIZE:], uniform(keys, first + SIZE)[0, first:]), "every bit of the uniforms"
    torch.testing.assert_close(out[:SIZE], gumbel(keys, first + SIZE)[0, first:], rtol=1e-6, atol=1e-6)


def test_gumbel_keeps_its_precision_at_both_ends():
    """Where 1 - u rounds to 1, -log(1 - u) is u: noise of a rare winner would be infinite without care."""
    u = torch.cat([2.0 ** -torch.arange(1.0, 33.5), torch.linspace(0.001, 1 - 2.0**-24, 31)])
    out = torch.empty(SIZE)
    _gumbel[(1,)](u, out, SIZE=SIZE)
    exact = -(-torch.log1p(-u.double())).log()
    torch.testing.assert_close(out.double(), exact, rtol=3e-7, atol=3e-7)
