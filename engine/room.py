"""What a model or a head that is not loaded yet will take of a GPU, from its files' headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from gammaray.engine.hf import decoder_layers
from gammaray.engine.pool import KVShape, bytes_per_block
from gammaray.engine.recurrent import is_recurrent


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes."""

    weights: int
    block: int = 0  # of KV, all layers together


def footprint(config: PreTrainedConfig, dtype: torch.dtype, block_size: int) -> Footprint:
    """Of the text model that `config` describes; its KV as grouped-query attention keeps it."""
    weights = _weights(_shell(config, dtype))
    if is_recurrent(config):
        return Footprint(weights)
    return Footprint(weights, _block(config, config.num_hidden_layers, dtype, block_size))


def layer_footprint(config: PreTrainedConfig, dtype: torch.dtype, block_size: int) -> Footprint:
    """Of one more layer of a model's own kind, and of what joins two states before it."""
    layer = _weights(decoder_layers(_shell(config, dtype))[-1])
    joining = 2 * config.hidden_size**2 * dtype.itemsize
    return Footprint(layer + joining, _block(config, 1, dtype, block_size))


def end_footprint(config: PreTrainedConfig, dtype: torch.dtype) -> Footprint:
    """Of a head of its own."""
    return Footprint(config.hidden_size * config.vocab_size * dtype.itemsize)


def head_footprint(
    folder: Path, config: Mapping[str, Any], layers: int | None, dtype: torch.dtype, block_size: int
) -> Footprint:
    """Of a draft head in a folder, with its config.json. `layers`: that attend; None: all that it names."""
    named = {**config, **config.get("transformer_layer_config", {})}  # as speculators writes it
    layers = named["num_hidden_layers"] if layers is None else layers
    block = _block(PreTrainedConfig(**named), layers, dtype, block_size) if layers else 0
    return Footprint(_elements(folder, named.get("hidden_size", 0)) * dtype.itemsize, block)


def _shell(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        shell: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return shell


def _weights(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())


def _block(config: Any, layers: int, dtype: torch.dtype, block_size: int) -> int:
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = KVShape(getattr(config, "num_key_value_heads", None) or heads, dim, dim)
    return bytes_per_block([shape] * layers, block_size, dtype)


def _elements(folder: Path, hidden: int) -> int:
    """Of all tensors, and of the rows of the target's head that stand in for a missing one; of pickles, which
    have no header, as many as 16 bits each make."""
    sizes: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                sizes[key] = torch.Size(file.get_slice(key).get_shape()).numel()
    if sizes:
        shared = 0 if "lm_head.weight" in sizes else sizes.get("d2t", 0)
        return sum(sizes.values()) + shared * hidden
    return sum(path.stat().st_size // 2 for kind in ("*.bin", "*.pt") for path in folder.glob(kind))
