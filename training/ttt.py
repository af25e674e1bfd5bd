"""EAGLE-3's training-time test (arXiv 2503.01840, section 3.2): learn on what one tells oneself in a draft.

A draft behind token i + 1 begins with the target's state behind token i, as its pair (see
`engine/drafters/features.py`), and goes on with the head's own states. All drafts of a text are unrolled side
by side: in level k each reads token i + k + 1 and the state that level k - 1 told it, at position i + k. It
sees the pairs up to its first, as the target's states made them, and of the others its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Layer(Protocol):
    """What is unrolled."""

    def __call__(self, embedded: Tensor, states: Tensor, level: int, sight: Sight) -> Tensor:
        """embedded [B, T, H], states [B, T, H] before them, of drafts at positions 0 + level, 1 + level, ...
        -> states [B, T, H] behind them. Attends once, through `sight`."""


@dataclass(slots=True)
class Sight:
    """The keys and values of the levels so far."""

    keys: list[Tensor] = field(default_factory=list)  # [B, Hkv, T, D] each
    values: list[Tensor] = field(default_factory=list)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, Hq, T, D], k and v [B, Hkv, T, D] of the next level, turned to their positions
        -> [B, Hq, T, D]. Of level 0 all before are seen, of later ones the own."""
        self.keys.append(k)
        self.values.append(v)
        batch, heads, length, size = q.shape
        q = q.view(batch, k.shape[1], -1, length, size) * size**-0.5  # [B, Hkv, G, T, D]
        scores = (q.flatten(2, 3) @ self.keys[0].mT).unflatten(2, (-1, length))  # [B, Hkv, G, T, T]
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
        own = [(q * key[:, :, None]).sum(-1, keepdim=True) for key in self.keys[1:]]  # [B, Hkv, G, T, 1]
        weights = torch.cat([scores, *own], -1).softmax(-1).to(v.dtype)
        shared = weights[..., :length].flatten(2, 3) @ self.values[0]  # [B, Hkv, G * T, D]
        out: Tensor = shared.unflatten(2, (-1, length))
        for place, value in enumerate(self.values[1:], length):
            out = out + weights[..., place, None] * value[:, :, None]
        return out.reshape(batch, heads, length, size)


def unroll(layer: Layer, embedded: Tensor, states: Tensor, depth: int) -> Iterator[Tensor]:
    """What each level tells: [B, T, H] of the drafts that begin with pairs 0, 1, ..., `depth` times.

    `embedded` [B, T, H]: of the tokens; `states` [B, T, H]: behind them, as the head begins with them. A
    draft that goes beyond the text's end reads zeros, and what it tells is of no use.
    """
    sight = Sight()
    for level in range(depth):
        states = layer(ahead(embedded, level + 1), states, level, sight)
        yield states


def ahead(x: Tensor, by: int) -> Tensor:
    """x [B, T, ...] of `by` places later, zeros (False) behind the end."""
    moved = torch.zeros_like(x)
    moved[:, : max(0, x.shape[1] - by)] = x[:, by:]
    return moved
