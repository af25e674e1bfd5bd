"""What makes the tokens of a block depend on one another, and how sure it is (DSpark, arXiv 2607.05147).

The backbone's logits of a place know nothing of the tokens drawn before it. The Markov head adds a bias of
low rank, W2 z, to them, with z from the embedding e = W1[previous token] (section 3.1):

    vanilla   z = e
    gated     z = sigmoid(G [h; e]) * e, with h the backbone's hidden state of the place
    rnn       g, c, o = J [s; e; h];  s <- sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c);  z = tanh(o)

The confidence head tells from h, and e if it was trained so, with which probability the place's token will be
accepted (section 3.2). It sees the tokens before the place, never the one that is drawn for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gammaray.engine.drafters.weights import Weights
from gammaray.engine.lean import Linear
from gammaray.engine.linear import pack_linear
from gammaray.errors import ConfigError


class Mixer(Protocol):
    def __call__(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """e [M, r], h [M, H] and the states s [M, r] before a place -> z [M, r] and the states behind it. The
        first place's is zero."""


@dataclass(frozen=True, slots=True)
class MarkovHead:
    embedding: Tensor  # [V, r], W1
    mix: Mixer
    project: Linear  # W2: [M, r] -> [M, Vd]

    def embed(self, previous: Tensor) -> Tensor:
        """[M] to [M, r]."""
        return self.embedding[previous]


@dataclass(frozen=True, slots=True)
class ConfidenceHead:
    project: Linear  # [M, H] or [M, H + r] -> [M, 1]
    embeds: bool
    temperatures: Tensor | None = None  # [D], of each drafted place (section 3.2.1); None: all 1

    def __call__(self, hidden: Tensor, embedded: Tensor | None, places: Sequence[int]) -> Tensor:
        """Probability [M] that the tokens of these places will be accepted."""
        if self.embeds:
            assert embedded is not None
            hidden = torch.cat([hidden, embedded], -1)
        told = self.project(hidden)[:, 0].float()
        return (told if self.temperatures is None else told / self.temperatures[list(places)]).sigmoid()


@dataclass(frozen=True, slots=True)
class _Gated:
    gate: Linear

    def __call__(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate(torch.cat([hidden, embedded], -1)).sigmoid() * embedded, state


@dataclass(frozen=True, slots=True)
class _Recurrent:
    joint: Linear

    def __call__(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate, output = self.joint(torch.cat([state, embedded, hidden], -1)).chunk(3, -1)
        keep = gate.sigmoid()
        return output.tanh(), keep * state + (1 - keep) * candidate.tanh()


def _vanilla(embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return embedded, state


@dataclass(frozen=True, slots=True)
class HeadSizes:
    vocab: int  # V, the target's
    draft_vocab: int  # Vd
    hidden: int  # H
    rank: int  # r; 0: no Markov head


def take_markov(weights: Weights, kind: str, sizes: HeadSizes) -> MarkovHead | None:
    """Raises ConfigError."""
    rank = sizes.rank
    if not rank:
        return None
    embedding = weights.take("markov_head.markov_w1.weight", sizes.vocab, rank)
    project = pack_linear(weights.take("markov_head.markov_w2.weight", sizes.draft_vocab, rank)).forward
    mix: Mixer
    if kind == "vanilla":
        mix = _vanilla
    elif kind == "gated":
        mix = _Gated(_biased(weights, "markov_head.gate_proj", rank, sizes.hidden + rank))
    elif kind == "rnn":
        mix = _Recurrent(_biased(weights, "markov_head.joint_proj", 3 * rank, 2 * rank + sizes.hidden))
    else:
        raise ConfigError(f"{weights.place}: markov_head_type {kind!r} is not vanilla, gated or rnn")
    return MarkovHead(embedding, mix, project)


def take_confidence(
    weights: Weights, embeds: bool, sizes: HeadSizes, temperatures: Sequence[float] = ()
) -> ConfidenceHead:
    """Raises ConfigError."""
    if embeds and not sizes.rank:
        raise ConfigError(f"{weights.place}: confidence_head_with_markov needs markov_rank above 0")
    inputs = sizes.hidden + (sizes.rank if embeds else 0)
    project = _biased(weights, "confidence_head.proj", 1, inputs)
    scale = torch.tensor(temperatures, device=weights.device) if temperatures else None
    return ConfidenceHead(project, embeds, scale)


def _biased(weights: Weights, name: str, outputs: int, inputs: int) -> Linear:
    weight, bias = weights.take(f"{name}.weight", outputs, inputs), weights.take(f"{name}.bias", outputs)
    return pack_linear(weight, bias).forward
