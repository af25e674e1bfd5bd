"""EAGLE-1 and 2 (arXiv 2401.15077, 2406.16858): one decoder layer over embedding and last hidden state.

Its hidden states are meant to be those that the target's head reads, and that head reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from gammaray.engine.attention import Attention
from gammaray.engine.drafters.features import FeatureDrafter, make_drafter
from gammaray.engine.drafters.head_loading import Tensors, fill, folder_of, read_config, read_tensors
from gammaray.engine.drafters.registry import Making
from gammaray.engine.hf import ATTENTION_NAME
from gammaray.engine.linear import pack_module
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError, VocabularyMismatch


class EagleHead(nn.Module):
    """Implements `gammaray.engine.drafters.head_runner.Head`. Keys: fc, layer, and maybe embed_tokens."""

    names: Tensor | None = None  # all of them

    def __init__(self, config: LlamaConfig, tensors: Tensors, target: ModelRunner, what: str) -> None:
        super().__init__()
        with torch.device("meta"):
            self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
            self.layer = LlamaDecoderLayer(config, 0)
            self.layer.register_module("input_layernorm", nn.Identity())  # what fc gives is not normed
            if "embed_tokens.weight" in tensors:
                self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        embedded = embed(target, [0])
        fill(self, tensors, what, like=embedded)
        self.layers: tuple[int, ...] = (target.num_layers + 1,)
        self._rope = LlamaRotaryEmbedding(config).to(embedded.device)
        self._target = target.telling
        pack_module(self)

    def enter(self, features: Tensor) -> Tensor:
        return features

    def forward(self, ids: Tensor, states: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        embedded = self.embed_tokens(ids) if hasattr(self, "embed_tokens") else self._target.embed(ids)
        x = self.fc(torch.cat([embedded, states], -1))[None]  # [1, T, H]
        rotation = self._rope(x, positions[None])
        behind: Tensor = self.layer(x, position_embeddings=rotation, gammaray=attention)[0]
        return behind

    def logits(self, states: Tensor) -> Tensor:
        return self._target.head(states)


def make(making: Making) -> FeatureDrafter:
    """Raises VocabularyMismatch, ConfigError."""
    folder, what = folder_of(making.config.path), f"drafter {making.name!r} ({making.config.path})"
    config = layer_config(read_config(folder), making)
    own = {short_key(key): x for key, x in read_tensors(folder).items()}
    return make_drafter(EagleHead(config, own, making.target, what), making)


def embed(target: ModelRunner, ids: list[int]) -> Tensor:
    """What the target's first layer reads, [len(ids), H]."""
    return target.telling.embed(torch.tensor(ids, device=target.device))


def short_key(key: str) -> str:
    """EAGLE calls its one layer `layers.0`, EAGLE-3 `midlayer`; some write `model.` before everything."""
    key = key.removeprefix("model.")
    for name in ("layers.0.", "midlayer."):
        key = key.replace(name, "layer.", 1) if key.startswith(name) else key
    return key


def layer_config(found: Mapping[str, Any], making: Making) -> LlamaConfig:
    """Of the one decoder layer, for a head of this target; `speculators` nests it.

    Raises VocabularyMismatch, ConfigError.
    """
    settings = found.get("transformer_layer_config", found)
    what = f"drafter {making.name!r} ({making.config.path})"
    if (kind := settings.get("model_type", "llama")) != "llama":
        raise ConfigError(f"{what} has a decoder layer of type {kind!a}: only llama is known")
    hidden, target = settings.get("hidden_size"), making.target
    if hidden != (size := embed(target, [0]).shape[1]):
        raise ConfigError(
            f"{what} has hidden_size {hidden!a}, the target {size}: give a head that was made for it"
        )
    if settings.get("vocab_size") != target.vocab_size:
        raise VocabularyMismatch(target.vocab_size, settings.get("vocab_size", 0), making.name)
    try:
        config = LlamaConfig(**settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} has a config.json that makes no decoder layer: {error}") from error
    config._attn_implementation = ATTENTION_NAME
    return config
