"""Hidden states beside the logits, for drafters that continue the target's own features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gammaray.engine.attention import Attention


@runtime_checkable
class FeatureModel(Protocol):
    """A `gammaray.engine.attention.Model` that also tells its hidden states."""

    def forward_features(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor,
        layers: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Logits [N, V] of the tokens `wanted` [N], and hidden states [T, len(layers) * H] of all tokens.

        Layer l means the state after l layers: 0 is the embeddings, the model's number of layers is what the
        final norm is about to read, and one more is what the head reads.
        """

    def embed(self, input_ids: Tensor) -> Tensor:
        """What the first layer reads: [T] to [T, H]."""

    def head(self, states: Tensor) -> Tensor:
        """Logits [N, V] of states [N, H] that the final norm has seen."""

    def head_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """What makes the logits of `tokens` [N] out of such states: weights [N, H], and biases [N] where the
        head has some. Copies, in the model's dtype, on its device."""


class Taps:
    """Keeps the hidden states of some layers while a model runs."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._kept: dict[int, Tensor] = {}

    def see(self, layer: int, x: Tensor) -> None:
        """x [T, H] after `layer` layers; a copy is kept, as models go on in place."""
        if layer in self.layers:
            self._kept[layer] = x.clone()

    def features(self) -> Tensor:
        """[T, len(layers) * H], layers in the order that was asked for."""
        return torch.cat([self._kept[layer] for layer in self.layers], -1)


def of_layers(features: Tensor, known: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """From features [N, len(known) * H] those of the layers `wanted`: [N, len(wanted) * H]."""
    states: Tensor = features.unflatten(-1, (len(known), -1))  # [N, L, H]
    return states[:, [known.index(layer) for layer in wanted]].flatten(1)
