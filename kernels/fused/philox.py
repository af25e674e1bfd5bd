"""Counter-based noise inside kernels: the stream of `kernels/philox.py`, word for word.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011; the rounds themselves are Triton's own
`tl.philox`, which is Philox4x32-10. One call makes the four words of tokens 4 b .. 4 b + 3, about 50 integer
instructions; the two logarithms of Gumbel noise cost about 40 a token. No memory is touched.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit(word):
    """(word + 1/2) 2^-32, at most 1 - 2^-24: uint32 to a float32 in (0, 1)."""
    return tl.minimum((word.to(tl.float32) + 0.5) * (2.0**-32), 1.0 - 2.0**-24)


@triton.jit
def gumbel(u):
    """-log(-log(1 - u)). The inner logarithm keeps the small u: Kahan's log1p, exact to a few ulp."""
    w = 1.0 - u
    lost = w == 1.0
    e = tl.where(lost, u, -tl.log(w) * (u / tl.where(lost, 1.0, 1.0 - w)))
    return -tl.log(e)


@triton.jit
def seed_of(low, high):
    """The 64-bit key from two int32 halves."""
    return (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(
        tl.uint64
    )


@triton.jit
def words_of(seed, blocks, position, sequence, lane):
    """Four uint32 words for each of `blocks` int32; `lane` is purpose + 256 rank."""
    zero = blocks * 0
    return tl.philox(seed, blocks, zero + position, zero + sequence, zero + lane)


@triton.jit
def gumbel_tile(seed, first, position, sequence, lane, SIZE: tl.constexpr):
    """Noise of the tokens first .. first + SIZE - 1, [SIZE]; `first` and SIZE are multiples of 4."""
    blocks = first // 4 + tl.arange(0, SIZE // 4)
    w0, w1, w2, w3 = words_of(seed, blocks, position, sequence, lane)
    return gumbel(unit(tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(SIZE)))


@triton.jit
def uniform_at(seed, index, position, sequence, lane):
    """The uniform of one token: scalars to a scalar float32."""
    w0, w1, w2, w3 = words_of(seed, index // 4, position, sequence, lane)
    word = index % 4
    return unit(tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3)))
