"""Multi-token prediction layers that a checkpoint ships with (DeepSeek-V3, arXiv 2412.19437, section 2.2).

One more decoder layer of the target's own architecture, over a projection of the embedding and the hidden
state, each normed. Public layouts differ in names and in the order of the two. Of several such layers the
first is used, again and again: it was trained for the token after the next, and states that come out of it
behind its norm are of the kind that goes in.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from gammaray.engine import loading
from gammaray.engine.attention import Attention
from gammaray.engine.drafters.eagle import embed
from gammaray.engine.drafters.features import FeatureDrafter, make_drafter
from gammaray.engine.drafters.head_loading import Tensors, fill, folder_of, read_tensors
from gammaray.engine.drafters.registry import Making
from gammaray.engine.hf import ATTENTION_NAME, decoder_layers
from gammaray.engine.linear import pack_module
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """What a family of checkpoints calls the parts, below `prefix`."""

    prefix: str  # {layers}: how many layers the target has
    enorm: str
    hnorm: str
    eh_proj: str
    norm: str
    layer: str = ""  # prefix of the decoder layer's own keys
    hidden_first: bool = False  # eh_proj reads the hidden state, then the embedding

    def names(self) -> dict[str, str]:
        """Beginnings of keys, and ours; the decoder layer, whose may be empty, comes last."""
        named = {self.enorm: "enorm.", self.hnorm: "hnorm.", self.eh_proj: "eh_proj.", self.norm: "norm."}
        shared = {"shared_head.head": "lm_head.", "embed_tokens": "embed_tokens."}
        return {f"{name}.": ours for name, ours in (named | shared).items()} | {self.layer: "layer."}

    def rename(self, key: str) -> str:
        names = self.names()
        own = next((name for name in names if key.startswith(name)), None)
        return key if own is None else names[own] + key.removeprefix(own)


LAYOUTS = (
    Layout("model.layers.{layers}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),  # DeepSeek-V3, GLM-4
    Layout(  # Qwen3-Next, Qwen3.5
        "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", layer="layers.0."
    ),
    Layout(  # MiMo
        "model.mtp_layers.0.",
        *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        hidden_first=True,
    ),
)


class MtpHead(nn.Module):
    """Implements `gammaray.engine.drafters.head_runner.Head`."""

    names: Tensor | None = None  # all of them

    def __init__(
        self, parts: Parts, tensors: Tensors, target: ModelRunner, hidden_first: bool, what: str
    ) -> None:
        super().__init__()
        size = parts.config.hidden_size
        with torch.device("meta"):
            self.enorm, self.hnorm, self.norm = (copy.deepcopy(parts.norm) for _ in range(3))
            self.eh_proj = nn.Linear(2 * size, size, bias=False)
            self.layer = parts.layer
            if "lm_head.weight" in tensors:
                self.lm_head = nn.Linear(size, target.vocab_size, bias=False)
            if "embed_tokens.weight" in tensors:
                self.embed_tokens = nn.Embedding(target.vocab_size, size)
        embedded = embed(target, [0])
        fill(self, fused_experts(tensors, self.state_dict()), what, like=embedded)
        self.layers: tuple[int, ...] = (target.num_layers + 1,)
        self._rope = parts.rope.to(embedded.device)
        self._target = target.telling
        self._hidden_first = hidden_first
        pack_module(self)

    def enter(self, features: Tensor) -> Tensor:
        return features

    def forward(self, ids: Tensor, states: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        embedded = self.embed_tokens(ids) if hasattr(self, "embed_tokens") else self._target.embed(ids)
        both = [self.enorm(embedded), self.hnorm(states)]
        x = self.eh_proj(torch.cat(both[::-1] if self._hidden_first else both, -1))[None]  # [1, T, H]
        rotation = self._rope(x, position_ids=positions[None])
        behind = self.layer(
            x,
            attention_mask=None,
            position_ids=positions[None],
            position_embeddings=rotation,
            gammaray=attention,
        )
        normed: Tensor = self.norm(behind[0] if isinstance(behind, Tensor) else behind[0][0])
        return normed

    def logits(self, states: Tensor) -> Tensor:
        if not hasattr(self, "lm_head"):
            return self._target.head(states)
        own: Tensor = self.lm_head(states)
        return own


@dataclass(frozen=True, slots=True)
class Parts:
    """Of the target's architecture, on the meta device but for `rope`."""

    config: PreTrainedConfig
    layer: nn.Module
    norm: nn.Module
    rope: nn.Module


def make(making: Making) -> FeatureDrafter:
    """Raises ConfigError."""
    source = making.config.path or making.model
    what = f"drafter {making.name!r} ({source})"
    count = making.target.num_layers
    prefixes = [layout.prefix.format(layers=count) for layout in LAYOUTS]
    found = read_tensors(folder_of(source), lambda key: key.startswith(tuple(prefixes)))
    for layout, prefix in zip(LAYOUTS, prefixes, strict=True):
        own = {key.removeprefix(prefix): x for key, x in found.items() if key.startswith(prefix)}
        if own:
            tensors = {layout.rename(key): x for key, x in own.items()}
            parts = one_more_layer(loading.load_config(making.model), what)
            head = MtpHead(parts, tensors, making.target, layout.hidden_first, what)
            return make_drafter(head, making)
    raise ConfigError(f"{what} ships no MTP layer: there are no keys {', '.join(prefixes)}*")


def one_more_layer(config: PreTrainedConfig, what: str) -> Parts:
    """The layer that would come behind the target's last. Raises ConfigError."""
    longer: Any = copy.deepcopy(config)
    count = config.num_hidden_layers
    for name, kinds in vars(config).items():
        if isinstance(kinds, list) and len(kinds) == count:  # of each layer
            full = "full_attention" if "full_attention" in kinds else kinds[-1]
            setattr(longer, name, [*kinds, full])
    longer.num_hidden_layers = count + 1
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(longer)
    model.set_attn_implementation(ATTENTION_NAME)
    base: Any = model.base_model
    if not hasattr(base, "rotary_emb") or not hasattr(base, "norm"):
        raise ConfigError(f"{what}: MTP layers of a {type(model).__name__} are not known")
    layer = decoder_layers(model)[-1]
    numbered: list[Any] = [module for module in layer.modules() if hasattr(module, "layer_idx")]
    for module in numbered:
        module.layer_idx = 0  # of the pages that are its own
    return Parts(longer, layer, base.norm, type(base.rotary_emb)(longer))


def fused_experts(tensors: Tensors, own: Iterable[str]) -> Tensors:
    """With the experts of a layer in two tensors, as transformers has them, [E, 2I, H] and [E, H, I]."""
    fused = dict(tensors)
    for stem in [key.removesuffix("gate_up_proj") for key in own if key.endswith(".experts.gate_up_proj")]:
        experts: list[tuple[Tensor, Tensor]] = []
        while f"{stem}{len(experts)}.down_proj.weight" in fused:
            names = [f"{stem}{len(experts)}.{name}_proj.weight" for name in ("gate", "up", "down")]
            gate, up, down = (fused.pop(name, torch.empty(0)) for name in names)
            experts.append((torch.cat([gate, up]), down))
        if experts:
            gate_up, down_proj = (torch.stack(part) for part in zip(*experts, strict=True))
            fused |= {f"{stem}gate_up_proj": gate_up, f"{stem}down_proj": down_proj}
    return fused
