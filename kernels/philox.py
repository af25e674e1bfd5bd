"""Counter-based noise: Philox4x32-10.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. Noise is a pure function of its key, so
it survives batching, preemption and resume, and it can be computed for a few tokens of a row without the
rest. Layout of the stream, the same for every backend:

    key      = (seed's low 32 bits, seed's high 32 bits)
    counter  = (token // 4, position, sequence, purpose + 256 * rank)
    token    uses output word token % 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers and Weyl constants of the paper's section 3.3
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10
_TOP = 1.0 - 2.0**-24  # the largest float32 below 1

Words4 = tuple[Tensor, Tensor, Tensor, Tensor]
Words2 = tuple[Tensor, Tensor]


class Purpose(IntEnum):
    """What noise is for. Different purposes at one position are independent."""

    TARGET = 0  # plain and coupled decoding; a coupled drafter shares it
    ACCEPT = 1  # rejection rule: one uniform per sibling
    RESIDUAL = 2  # rejection rule: the recovered or bonus token
    DRAFT = 3  # a drafter that draws on its own


@dataclass(frozen=True, slots=True)
class NoiseKeys:
    """One key per row, each field [N] int64. `rank` (below 2^24) tells apart draws at one position."""

    seed: Tensor
    sequence: Tensor
    position: Tensor
    purpose: Tensor
    rank: Tensor

    @classmethod
    def build(
        cls,
        seeds: Sequence[int],
        sequences: Sequence[int],
        positions: Sequence[int],
        purpose: Purpose,
        ranks: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> NoiseKeys:
        """Keys from Python ints. Seeds count modulo 2^64, so both signed and unsigned ones are fine."""
        columns = (
            [_signed(seed) for seed in seeds],
            sequences,
            positions,
            [int(purpose)] * len(seeds),
            [0] * len(seeds) if ranks is None else ranks,
        )
        return cls(*(torch.tensor(column, dtype=torch.int64, device=device) for column in columns))


def philox(counter: Words4, key: Words2) -> Words4:
    """Philox4x32-10 on int64 tensors that hold 32-bit words; the words broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap, yet their bits are those of the unsigned product: masking repairs the shift.
        a, b = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = _mix(b >> 32, c1, k0), b & _MASK, _mix(a >> 32, c3, k1), a & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(keys: NoiseKeys, n: int) -> Tensor:
    """Uniforms in (0, 1) for tokens 0..n-1 of each row: [N, n] float32.

    u = (x + 1/2) 2^-32 for a 32-bit x: float32 keeps all 32 bits where u is small, and never gives 0 or 1.
    """
    blocks = torch.arange((n + 3) // 4, device=keys.seed.device)[None]  # [1, B]
    words = [_unit(word) for word in _words(keys, blocks)]
    return torch.stack(words, dim=-1).flatten(1)[:, :n].contiguous()  # [N, n]


def gumbel(keys: NoiseKeys, vocab: int) -> Tensor:
    """Gumbel noise G = -log(E), E = -log(1 - u), for each token: [N, V] float32, finite.

    A rare token wins by a tiny E. u is small there, so float32 resolves E to 2^-24 of itself down to 2^-33;
    at the other end u stops at 1 - 2^-24 (G = -2.8), where no token can win. float64 would only add time.
    """
    return _gumbel(uniform(keys, vocab))


def gumbel_at(keys: NoiseKeys, tokens: Tensor) -> Tensor:
    """`gumbel(keys, V).gather(1, tokens)` at the cost of these tokens: [N, S] int64 to [N, S] float32."""
    words = torch.stack(_words(keys, tokens >> 2), dim=-1)  # [N, S, 4]
    return _gumbel(_unit(words.gather(-1, (tokens & 3)[..., None])[..., 0]))


def _words(keys: NoiseKeys, blocks: Tensor) -> Words4:
    counter = (
        blocks,
        (keys.position & _MASK)[:, None],
        (keys.sequence & _MASK)[:, None],
        (keys.purpose + (keys.rank << 8))[:, None],
    )
    return philox(counter, ((keys.seed & _MASK)[:, None], ((keys.seed >> 32) & _MASK)[:, None]))


def _mix(high: Tensor, word: Tensor, key: Tensor) -> Tensor:
    return (high ^ (word ^ key)) & _MASK


def _unit(word: Tensor) -> Tensor:
    return word.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_TOP)


def _gumbel(u: Tensor) -> Tensor:
    return u.neg_().log1p_().neg_().log_().neg_()


def _signed(seed: int) -> int:
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
