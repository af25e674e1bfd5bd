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
from gammaray.engine.device import resolve_dtype
from gammaray.engine.drafters.eagle import embed, layer_config, short_key
from gammaray.engine.drafters.features import FeatureDrafter, make_drafter
from gammaray.engine.drafters.head_loading import Tensors, fill, folder_of, read_config, read_tensors
from gammaray.engine.drafters.registry import Making
from gammaray.engine.lean import Linear, Rope, doubled, rms_norm, take_layer
from gammaray.engine.linear import pack_linear
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError

UNKNOWN = ("norm_before_fc", "fc_norm", "norm_output")  # of newer speculators; none of these is known here


@dataclass(frozen=True, slots=True)
class Form:
    """What a checkpoint says of itself."""

    config: LlamaConfig
    layers: tuple[int, ...]  # of the target
    tokens: Tensor  # [Vd], of the target's vocabulary, what each token of the draft vocabulary is
    norm_before_residual: bool
    dtype: torch.dtype


class WideLayer(nn.Module):
    """The weights of a Llama layer whose attention reads the embedding and the hidden state side by side
    (section 3.1)."""

    def __init__(self, config: LlamaConfig) -> None:
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


class Weights(nn.Module):
    """Everything that is learned, by the keys of a checkpoint (`fill`), without memory of its own before."""

    def __init__(self, form: Form, embeds: bool) -> None:
        super().__init__()
        config, size = form.config, form.config.hidden_size
        with torch.device("meta"):
            self.fc = nn.Linear(len(form.layers) * size, size, bias=False)
            self.layer = WideLayer(config)
            self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
            self.lm_head = nn.Linear(size, len(form.tokens), bias=False)
            if embeds:
                self.embed_tokens = nn.Embedding(config.vocab_size, size)


class Eagle3Head:
    """Implements `gammaray.engine.drafters.head_runner.Head`, in as few calls as the target's own layers."""

    def __init__(self, form: Form, tensors: Tensors, target: ModelRunner, what: str) -> None:
        weights, embedded = Weights(form, "embed_tokens.weight" in tensors), embed(target, [0])
        fill(weights, tensors, what, like=embedded.to(form.dtype))
        self.layers = form.layers
        self.names: Tensor | None = form.tokens.to(embedded.device)
        self._fuse = pack(weights.fc)
        own = getattr(weights, "embed_tokens", None)
        self._embed: Linear = target.telling.embed if own is None else own.forward
        self._rope = Rope.of(LlamaRotaryEmbedding(form.config).to(embedded.device))
        self._eps = form.config.rms_norm_eps
        self._hidden_norm, self._norm = doubled(weights.layer.hidden_norm), doubled(weights.norm)
        self._layer = take_layer(weights.layer, self._eps)
        self._head = pack(weights.lm_head)
        self._activate: Linear = weights.layer.mlp.act_fn
        self._norm_before_residual = form.norm_before_residual
        self._dtype = form.dtype

    def enter(self, features: Tensor) -> Tensor:
        return self._fuse(features.to(self._dtype))

    def forward(self, ids: Tensor, states: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        normed = rms_norm(states, self._hidden_norm, self._eps)
        x = normed if self._norm_before_residual else states
        embedded = rms_norm(self._embed(ids).to(self._dtype), self._layer.input_norm, self._eps)
        both = torch.cat([embedded, normed], -1)  # [T, 2H]
        x = x + self._layer.attend(0, both, self._rope.turn(positions, x.dtype), attention)
        return x + self._layer.transform(x, self._activate)

    def logits(self, states: Tensor) -> Tensor:
        return self._head(rms_norm(states, self._norm, self._eps))


def pack(linear: nn.Linear) -> Linear:
    """The layer as fast as this machine has it."""
    return pack_linear(linear.weight.detach(), None if linear.bias is None else linear.bias.detach()).forward


def make(making: Making) -> FeatureDrafter:
    """Raises VocabularyMismatch, ConfigError."""
    folder, what = folder_of(making.config.path), f"drafter {making.name!r} ({making.config.path})"
    found = read_config(folder)
    if asked := [name for name in UNKNOWN if found.get(name)]:
        raise ConfigError(f"{what} asks for {', '.join(asked)}, which is not known: use a head without it")
    config = layer_config(found, making)
    tensors = {short_key(key): x for key, x in read_tensors(folder).items()}
    tensors.pop("t2d", None)  # says the same as d2t
    tokens = draft_tokens(tensors, making.target.vocab_size, what)
    if "lm_head.weight" not in tensors:
        tensors |= target_rows(tokens, making.target)
    layers = feature_layers(found, making.target.num_layers, what)
    dtype = resolve_dtype(making.config.dtype or making.target.dtype, making.target.device)
    form = Form(config, layers, tokens, bool(found.get("norm_before_residual", False)), dtype)
    return make_drafter(Eagle3Head(form, tensors, making.target, what), making)


def draft_tokens(tensors: Tensors, vocab_size: int, what: str) -> Tensor:
    """The target's token [Vd] of each draft token: it and its offset in d2t, which is taken out.

    Raises ConfigError.
    """
    head, offsets = tensors.get("lm_head.weight"), tensors.pop("d2t", None)
    told = offsets if head is None else head
    if told is None:
        raise ConfigError(f"{what} has neither lm_head.weight nor d2t: one of them tells its vocabulary")
    tokens = torch.arange(size := len(told))
    if offsets is not None:
        if offsets.shape != tokens.shape:
            raise ConfigError(f"{what} has d2t of shape {list(offsets.shape)} for {size} draft tokens")
        tokens = tokens + offsets.to(torch.int64)
    elif size != vocab_size:
        raise ConfigError(f"{what} has {size} draft tokens of the target's {vocab_size}, but no d2t")
    if not size or len(tokens.unique()) < size or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ConfigError(f"{what} has a d2t that does not name {size} different tokens of {vocab_size}")
    return tokens


def target_rows(tokens: Tensor, target: ModelRunner) -> Tensors:
    """The rows of the target's own head that belong to `tokens` [Vd], as a head of these tokens alone.

    A head that shares them stores none: its states are to be read by what reads the target's.
    """
    weight, bias = target.telling.head_rows(tokens.to(target.device))
    return {"lm_head.weight": weight} | ({} if bias is None else {"lm_head.bias": bias})


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
