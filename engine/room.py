"""What a model that is not loaded yet will take of a GPU, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from gammaray.engine.pool import KVShape, bytes_per_block


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes."""

    weights: int
    block: int  # of KV, all layers together


def footprint(config: PreTrainedConfig, dtype: torch.dtype, block_size: int) -> Footprint:
    """Of the text model that `config` describes; its KV as grouped-query attention keeps it."""
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = sum(parameter.numel() * parameter.itemsize for parameter in shell.parameters())
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = KVShape(getattr(config, "num_key_value_heads", None) or heads, dim, dim)
    return Footprint(weights, bytes_per_block([shape] * config.num_hidden_layers, block_size, dtype))
