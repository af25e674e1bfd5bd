"""Tiny models with random weights, float32 and seeded: `from tiny import tiny_llama`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # large enough that context matters to the logits
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_llama(vocab: int = 32, layers: int = 2, seed: int = 0, **cfg: Any) -> PreTrainedModel:
    """A Llama whose next token depends on its context; `cfg` overrides `SIZES`."""
    return tiny_model(LlamaConfig, vocab=vocab, layers=layers, seed=seed, **cfg)


def tiny_model(
    config_class: Any, vocab: int = 32, layers: int = 2, seed: int = 0, **cfg: Any
) -> PreTrainedModel:
    """A tiny random model of any transformers configuration class."""
    config = config_class(**{**SIZES, "vocab_size": vocab, "num_hidden_layers": layers, **cfg})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()
