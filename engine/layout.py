"""Whether a drafter may read the keys and values of the target's first layers as if they were its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gammaray.engine.hf import decoder_layers
from gammaray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What the keys and values of a model's first layers depend on, apart from the tokens.

    Two models with equal layouts write the same keys and values, so that one may use the other's pages.
    """

    rope_theta: object
    rope_scaling: object
    position_offset: int  # the first token's position, where a checkpoint counts from another number than 0
    heads: tuple[int, int, int]  # of queries, of keys and values, and the size of one
    prefix_hash: str  # of the weights of the embeddings and of the first layers


NAMES = {
    "rope_theta": "RoPE theta",
    "rope_scaling": "RoPE scaling",
    "position_offset": "position offset",
    "heads": "heads (of queries, of keys and values, size)",
    "prefix_hash": "prefix hash (weights of the embeddings and the first layers)",
}


def layout(model: PreTrainedModel) -> KVLayout:
    """Of a model that was cut to its first layers (`loading.load_first`). Reads all their weights."""
    config: Any = model.config.get_text_config()
    theta, scaling = _rope(getattr(config, "rope_parameters", None) or {})
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVLayout(theta, scaling, _offset(model), (heads, kv_heads, size), _hash(model))


def check_sharing(drafter: str, own: KVLayout, target: KVLayout) -> None:
    """Raises ConfigError that names everything in which the two differ."""
    pairs = asdict(own).items(), asdict(target).items()
    differences = [
        f"{NAMES[key]} {found}, the target's is {expected}"
        for (key, found), (_, expected) in zip(*pairs, strict=True)
        if found != expected
    ]
    if differences:
        raise ConfigError(
            f"drafter {drafter!r} cannot share the target's KV: {'; '.join(differences)}. "
            "method: model recomputes it"
        )


def _rope(parameters: Mapping[str, Any]) -> tuple[object, object]:
    """Theta, and everything else; where kinds of layers differ, both by kind."""
    if parameters and all(isinstance(own, Mapping) for own in parameters.values()):
        thetas, scalings = zip(*map(_rope, parameters.values()), strict=True)
        return dict(zip(parameters, thetas, strict=True)), dict(zip(parameters, scalings, strict=True))
    return parameters.get("rope_theta"), {k: v for k, v in sorted(parameters.items()) if k != "rope_theta"}


def _offset(model: PreTrainedModel) -> int:
    """Of a learned position embedding (OPT's), or as the configuration has it."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and isinstance(offset := getattr(module, "offset", None), int):
            return offset
    return int(getattr(model.config.get_text_config(), "position_offset", 0))


@torch.no_grad()
def _hash(model: PreTrainedModel) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in _prefix(model):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _prefix(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Embeddings of tokens and of positions, then the layers."""
    for name, module in model.base_model.named_modules():
        if isinstance(module, nn.Embedding):
            yield name, module.weight
    for index, layer in enumerate(decoder_layers(model)):
        for name, tensor in layer.state_dict().items():
            yield f"{index}.{name}", tensor
