"""EAGLE-3 (arXiv 2503.01840): one decoder layer over embedding and three of the target's states.

Reads the key layouts of EAGLE-3 and SpecForge (`midlayer.`) and of speculators (`layers.0.`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from gammaray.engine.attention import Attention
from gammaray.engine.drafters.eagle import embed, layer_config, short_key
from gammaray.engine.drafters.features import FeatureDrafter, make_drafter
from gammaray.engine.drafters.head_loading import Tensors, fill, folder_of, read_config, read_tensors
from gammaray.engine.drafters.registry import Making
from gammaray.engine.linear import pack_module
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError

NEVER = -1e4  # logit of tokens outside the draft vocabulary: finite, as log-probabilities are subtracted
UNKNOWN = ("norm_before_fc", "fc_norm", "norm_output")  # of newer speculators; none of these is known here


class WideLayer(nn.Module):
    """A Llama layer whose attention reads the embedding and the hidden state side by side (section 3.1)."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * narrow.in_features, narrow.out_features, narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.mlp = LlamaMLP(config)
        self._norm_before_residual = norm_before_residual

    def forward(
        self, embedded: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """embedded and states [1, T, H] -> [1, T, H]."""
        normed = self.hidden_norm(states)
        x = normed if self._norm_before_residual else states
        both = torch.cat([self.input_layernorm(embedded), normed], -1)  # [1, T, 2H]
        x = x + self.self_attn(both, position_embeddings=rotation, gammaray=attention)[0]
        behind: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return behind


@dataclass(frozen=True, slots=True)
class Form:
    """What a checkpoint says of itself."""

    config: LlamaConfig
    layers: tuple[int, ...]  # of the target
    tokens: Tensor  # [Vd], of the target's vocabulary, what each token of the draft vocabulary is
    norm_before_residual: bool = False


class Eagle3Head(nn.Module):
    """Implements `gammaray.engine.drafters.head_runner.Head`."""

    def __init__(self, form: Form, tensors: Tensors, target: ModelRunner, what: str) -> None:
        super().__init__()
        config, size = form.config, form.config.hidden_size
        with torch.device("meta"):
            self.fc = nn.Linear(len(form.layers) * size, size, bias=False)
            self.layer = WideLayer(config, form.norm_before_residual)
            self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
            self.lm_head = nn.Linear(size, len(form.tokens), bias=False)
            if "embed_tokens.weight" in tensors:
                self.embed_tokens = nn.Embedding(config.vocab_size, size)
        embedded = embed(target, [0])
        fill(self, tensors, what, like=embedded)
        self.layers = form.layers
        self._tokens = form.tokens.to(embedded.device)
        self._vocab_size = target.vocab_size
        self._rope = LlamaRotaryEmbedding(config).to(embedded.device)
        self._target = target.telling
        pack_module(self)

    def enter(self, features: Tensor) -> Tensor:
        fused: Tensor = self.fc(features)
        return fused

    def forward(self, ids: Tensor, states: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        embedded = self.embed_tokens(ids) if hasattr(self, "embed_tokens") else self._target.embed(ids)
        rotation = self._rope(states[None], positions[None])
        behind: Tensor = self.layer(embedded[None], states[None], rotation, attention)[0]
        return behind

    def logits(self, states: Tensor) -> Tensor:
        own: Tensor = self.lm_head(self.norm(states))  # [N, Vd]
        return own.new_full((len(own), self._vocab_size), NEVER).index_copy_(1, self._tokens, own)


def make(making: Making) -> FeatureDrafter:
    """Raises VocabularyMismatch, ConfigError."""
    folder, what = folder_of(making.config.path), f"drafter {making.name!r} ({making.config.path})"
    found = read_config(folder)
    if asked := [name for name in UNKNOWN if found.get(name)]:
        raise ConfigError(f"{what} asks for {', '.join(asked)}, which is not known: use a head without it")
    config = layer_config(found, making)
    tensors = {short_key(key): x for key, x in read_tensors(folder).items()}
    tensors.pop("t2d", None)  # says the same as d2t
    rows = len(tensors.get("lm_head.weight", ()))
    tokens = draft_tokens(tensors.pop("d2t", None), rows, making.target.vocab_size, what)
    layers = feature_layers(found, making.target.num_layers, what)
    form = Form(config, layers, tokens, bool(found.get("norm_before_residual", False)))
    return make_drafter(Eagle3Head(form, tensors, making.target, what), making)


def draft_tokens(offsets: Tensor | None, size: int, vocab_size: int, what: str) -> Tensor:
    """The target's token [Vd] of each draft token: it and its offset. Raises ConfigError."""
    tokens = torch.arange(size)
    if offsets is not None:
        if offsets.shape != tokens.shape:
            raise ConfigError(f"{what} has d2t of shape {list(offsets.shape)} for {size} draft tokens")
        tokens = tokens + offsets.to(torch.int64)
    elif size != vocab_size:
        raise ConfigError(f"{what} has {size} draft tokens of the target's {vocab_size}, but no d2t")
    if not size or len(tokens.unique()) < size or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ConfigError(f"{what} has a d2t that does not name {size} different tokens of {vocab_size}")
    return tokens


def feature_layers(found: Mapping[str, Any], count: int, what: str) -> tuple[int, ...]:
    """Whose hidden states are read, as `Featured` counts them. Raises ConfigError.

    speculators names the layers that read them next, SpecForge (`eagle_config`) those that wrote them.
    """
    nested = found.get("eagle_config") or {}
    written = [layer + 1 for layer in nested.get("eagle_aux_hidden_state_layer_ids") or ()]
    named = found.get("eagle_aux_hidden_state_layer_ids") or written or [2, count // 2, count - 3]
    if not all(isinstance(layer, int) and 0 <= layer <= count for layer in named):
        raise ConfigError(f"{what} reads the target's layers {named!a}: it has {count}")
    return tuple(named)
