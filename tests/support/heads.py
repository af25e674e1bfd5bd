"""Tiny draft heads with random weights in the layouts of public checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

SCALE = 0.3  # of weights: large enough that context matters
Tensors = dict[str, Tensor]


class Random:
    """Tensors of one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator) * SCALE

    def norm(self, size: int) -> Tensor:
        return 1 + torch.randn(size, generator=self._generator) * 0.1


def llama_layer(config: Any, draw: Random, reads: int) -> Tensors:
    """Attention over inputs of `reads` numbers, MLP, and the norm between, without the first norm."""
    size, inner = config.hidden_size, config.intermediate_size
    head = size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    return {
        "self_attn.q_proj.weight": draw.matrix(queries, reads),
        "self_attn.k_proj.weight": draw.matrix(keys, reads),
        "self_attn.v_proj.weight": draw.matrix(keys, reads),
        "self_attn.o_proj.weight": draw.matrix(size, queries),
        "mlp.gate_proj.weight": draw.matrix(inner, size),
        "mlp.up_proj.weight": draw.matrix(inner, size),
        "mlp.down_proj.weight": draw.matrix(size, inner),
        "post_attention_layernorm.weight": draw.norm(size),
    }


def eagle(target: PreTrainedModel, seed: int = 3) -> Tensors:
    config, draw = target.config, Random(seed)
    layer = llama_layer(config, draw, config.hidden_size)
    return {f"layers.0.{key}": x for key, x in layer.items()} | {
        "fc.weight": draw.matrix(config.hidden_size, 2 * config.hidden_size),
        "fc.bias": draw.matrix(config.hidden_size),
    }


def eagle3(target: PreTrainedModel, tokens: list[int], seed: int = 4, layer: str = "midlayer.") -> Tensors:
    """`tokens`: of the target's vocabulary, those of the draft vocabulary."""
    config, draw = target.config, Random(seed)
    size = config.hidden_size
    norms = {f"{name}.weight": draw.norm(size) for name in ("input_layernorm", "hidden_norm")}
    inner = llama_layer(config, draw, 2 * size) | norms
    return {f"{layer}{key}": x for key, x in inner.items()} | {
        "fc.weight": draw.matrix(size, 3 * size),
        "norm.weight": draw.norm(size),
        "lm_head.weight": draw.matrix(len(tokens), size),
        "d2t": torch.tensor(tokens) - torch.arange(len(tokens)),
        "t2d": torch.isin(torch.arange(config.vocab_size), torch.tensor(tokens)),
    }


def lean_eagle3(target: PreTrainedModel, tokens: list[int]) -> Tensors:
    """As `gammaray train eagle` saves it: in bfloat16, without a table of embeddings and without lm_head, of
    which the target has both."""
    tensors = eagle3(target, tokens)
    del tensors["lm_head.weight"]
    return {key: x.bfloat16() if x.is_floating_point() else x for key, x in tensors.items()}


# What a family calls the norms of embedding and state, the projection, the last norm, and its layer's keys.
MTP_NAMES = {
    "deepseek": ("model.layers.{layers}.", "enorm", "hnorm", "eh_proj", "shared_head.norm", ""),
    "qwen3_next": ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."),
    "mimo": (
        "model.mtp_layers.0.",
        *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        "",
    ),
}


def mtp(target: PreTrainedModel, layout: str, layer: Tensors, seed: int = 5, shared: bool = False) -> Tensors:
    """`layer`: a decoder layer by its own keys. `shared`: with embedding and head, as DeepSeek has."""
    config, draw = target.config, Random(seed)
    size = config.hidden_size
    prefix, enorm, hnorm, projection, norm, inner = MTP_NAMES[layout]
    found = {f"{name}.weight": draw.norm(size) for name in (enorm, hnorm, norm)}
    found |= {f"{projection}.weight": draw.matrix(size, 2 * size)}
    found |= {f"{inner}{key}": x for key, x in layer.items()}
    if shared:
        found["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
        found["shared_head.head.weight"] = target.get_output_embeddings().weight.detach().clone()
    return {prefix.format(layers=config.num_hidden_layers) + key: x for key, x in found.items()}


def settings(target: PreTrainedModel, **more: Any) -> dict[str, Any]:
    """config.json of a head."""
    config = target.config
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    found = {name: getattr(config, name) for name in (*names, "rms_norm_eps", "hidden_act")}
    return {"model_type": "llama", "num_hidden_layers": 1, "rope_theta": 10000.0, **found, **more}


def write(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None, pickled: bool = False) -> str:
    """A checkpoint; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
