"""Language models whose whole past is a state of fixed size: state space models (Mamba, arXiv 2312.00752).

Such a state cannot be cut back, so whoever may have to go back keeps it: here it is one vector. One pass goes
on from the states of several sequences, or of several nodes of a draft tree, alike.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from gammaray.errors import ModelUnsupported

TRIAL = (1, 4, 2, 5, 3, 6, 0, 1)  # tokens
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 2e-2}  # of the largest logit


def is_recurrent(config: PreTrainedConfig) -> bool:
    """Whether no layer keeps anything that grows with the sequence."""
    kinds = getattr(config, "layer_types", None)
    return kinds is not None and len(kinds) > 0 and set(kinds) <= {"linear_attention", "conv"}


class RecurrentRunner:
    """A state is a vector [F] float32: what all layers keep, one after the other."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ModelUnsupported when states do not lead where one pass over the whole sequence does."""
        self._model: Any = model
        self._config = model.config.get_text_config()
        self.vocab_size: int = self._config.vocab_size
        self.num_layers: int = self._config.num_hidden_layers
        self.dtype, self.device = model.dtype, model.device
        self._template = DynamicCache(config=self._config)  # of one sequence
        try:
            self.continues = self._prove()
        except Exception as error:  # whatever a foreign model raises
            raise ModelUnsupported(
                f"{type(model).__name__} cannot draft from states that are kept: {error}"
            ) from error

    @property
    def state_bytes(self) -> int:
        """Of one state as it is kept."""
        return 4 * sum(kept[key].numel() for kept, key in _parts(self._template))

    @torch.no_grad()
    def forward(
        self, tokens: Sequence[Sequence[int]], states: Sequence[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, V] float32 and states [B, F] behind B pieces of equal length T.

        `states`: what they go on from, [F] each, left as they are; None: the pieces begin their sequences.
        Where the runner does not `continues`, T is 1 with states: Mamba's own scan would begin at zero.
        """
        cache = DynamicCache(config=self._config) if states is None else self._cache(torch.stack([*states]))
        ids = torch.tensor([[*piece] for piece in tokens], device=self.device)  # [B, T]
        out = self._model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        flat = [kept[key].float().flatten(1) for kept, key in _parts(cache)]
        return out.logits[:, -1].float(), torch.cat(flat, 1)

    def _cache(self, states: Tensor) -> DynamicCache:
        """Of states [B, F]."""
        cache = copy.copy(self._template)
        layers: list[Any] = [copy.copy(layer) for layer in self._template.layers]
        cache.layers = layers
        for layer in layers:
            layer.conv_states, layer.recurrent_states = dict(layer.conv_states), dict(layer.recurrent_states)
        first = 0
        for kept, key in _parts(cache):
            like = kept[key]
            part = states[:, first : first + like.numel()].reshape(-1, *like.shape[1:])
            kept[key] = part.to(like.dtype, copy=True)
            first += like.numel()
        return cache

    @torch.no_grad()
    def _prove(self) -> bool:
        """Whether several tokens at once may go on from a state; that single ones may is a must."""
        ids = torch.tensor([TRIAL], device=self.device) % self.vocab_size
        tokens: list[int] = ids[0].tolist()
        half = len(tokens) // 2
        truth = self._model(input_ids=ids, use_cache=False).logits[0, -1].float()  # [V]
        self._model(input_ids=ids[:, :half], cache=self._template, use_cache=True)
        _, begun = self.forward([tokens[:half]], None)
        states = begun
        for token in tokens[half:]:
            logits, states = self.forward([[token]], [*states])
        if not self._agree(logits[0], truth):
            raise ValueError("token by token its logits are others than in one pass")
        logits, _ = self.forward([tokens[half:]], [*begun])
        return self._agree(logits[0], truth)

    def _agree(self, found: Tensor, truth: Tensor) -> bool:
        error = (found - truth).abs().max() / truth.abs().max().clamp(min=1e-6)
        return bool(error <= TOLERANCE[self.dtype])


def _parts(cache: DynamicCache) -> Iterator[tuple[dict[int, Tensor], int]]:
    """Where the states [B, ...] of all layers are, in order."""
    layers: list[Any] = cache.layers
    for layer in layers:
        for kept in (layer.conv_states, layer.recurrent_states):
            yield from ((kept, key) for key in sorted(kept) if kept[key] is not None)
