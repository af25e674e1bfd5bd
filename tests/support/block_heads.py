"""Tiny Medusa heads and block drafters with random weights, in the layouts of public checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from support.heads import Random, Tensors, llama_layer, write

HEAD_DIM = 8
RANK = 6
BLOCK = 5
Layout = Literal["deepspec", "speculators"]


def medusa(target: PreTrainedModel, heads: int = 4, layers: int = 2, seed: int = 11) -> Tensors:
    size, draw = target.config.hidden_size, Random(seed)
    found: Tensors = {}
    for head in range(heads):
        for layer in range(layers):
            found[f"{head}.{layer}.linear.weight"] = draw.matrix(size, size)
            found[f"{head}.{layer}.linear.bias"] = draw.matrix(size)
        found[f"{head}.{layers}.weight"] = draw.matrix(target.config.vocab_size, size)
    return found


def medusa_settings(heads: int = 4, layers: int = 2) -> dict[str, Any]:
    return {"medusa_num_heads": heads, "medusa_num_layers": layers, "base_model_name_or_path": "target"}


def backbone(target: PreTrainedModel, layers: int) -> dict[str, Any]:
    config = target.config
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    return {name: getattr(config, name) for name in same} | {
        "model_type": "qwen3",
        "head_dim": HEAD_DIM,
        "num_hidden_layers": layers,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
    }


def dspark_settings(target: PreTrainedModel, layout: Layout = "deepspec", **more: Any) -> dict[str, Any]:
    """config.json of a drafter that reads the states after layers 1 and 3."""
    heads = {"block_size": BLOCK, "mask_token_id": target.config.vocab_size - 1, "markov_rank": RANK}
    heads |= {"markov_head_type": "vanilla", "enable_confidence_head": True}
    inner = backbone(target, layers=2)
    if layout == "deepspec":
        own = {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [0, 2], "num_anchors": 8}
        return inner | heads | own | {"confidence_head_with_markov": True} | more
    own = {"speculators_model_type": "dspark", "aux_hidden_state_layer_ids": [1, 3]}
    own |= {"draft_vocab_size": target.config.vocab_size, "transformer_layer_config": inner}
    return heads | own | more


def dspark(target: PreTrainedModel, settings: dict[str, Any], seed: int = 12) -> Tensors:
    """The tensors that go with `settings`. A smaller draft vocabulary leaves out every third token."""
    config, draw = target.config, Random(seed)
    inner = settings.get("transformer_layer_config", settings)
    size, vocab = config.hidden_size, config.vocab_size
    drafted = settings.get("draft_vocab_size", vocab)
    found = {"fc.weight": draw.matrix(size, 2 * size)}
    found |= {"hidden_norm.weight": draw.norm(size), "norm.weight": draw.norm(size)}
    for index in range(inner["num_hidden_layers"]):
        layer = llama_layer(target.config, draw, size)
        layer |= {f"self_attn.{x}_norm.weight": draw.norm(HEAD_DIM) for x in "qk"}
        layer |= {"input_layernorm.weight": draw.norm(size)}
        found |= {f"layers.{index}.{key}": tensor for key, tensor in layer.items()}
    if "speculators_model_type" not in settings:  # has frozen copies of the target's
        found["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
        found["lm_head.weight"] = target.get_output_embeddings().weight.detach().clone()
    if drafted < vocab:
        kept = torch.tensor([token for token in range(vocab) if token % 3][:drafted])
        found["d2t"] = kept - torch.arange(drafted)
        found["t2d"] = torch.isin(torch.arange(vocab), kept)
        found["lm_head.weight"] = draw.matrix(drafted, size)
    return found | _heads(settings, draw, size, vocab, drafted)


def _heads(settings: dict[str, Any], draw: Random, size: int, vocab: int, drafted: int) -> Tensors:
    if settings.get("speculators_model_type") == "dflash":
        return {}
    rank, kind = settings["markov_rank"], settings["markov_head_type"]
    found: Tensors = {}
    if rank:
        found["markov_head.markov_w1.weight"] = 3 * draw.matrix(vocab, rank)
        found["markov_head.markov_w2.weight"] = 3 * draw.matrix(drafted, rank)
    shapes = {"gated": ("gate_proj", rank, size + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + size)}
    if rank and kind in shapes:
        name, outputs, inputs = shapes[kind]
        found[f"markov_head.{name}.weight"] = draw.matrix(outputs, inputs)
        found[f"markov_head.{name}.bias"] = draw.matrix(outputs)
    if settings["enable_confidence_head"]:
        inputs = size + (rank if settings.get("confidence_head_with_markov", True) else 0)
        found["confidence_head.proj.weight"] = draw.matrix(1, inputs)
        found["confidence_head.proj.bias"] = draw.matrix(1)
    return found


def write_dspark(folder: Path, target: PreTrainedModel, layout: Layout = "deepspec", **more: Any) -> str:
    """A checkpoint; returns its path."""
    settings = dspark_settings(target, layout, **more)
    return write(folder, dspark(target, settings), settings)
