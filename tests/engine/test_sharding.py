"""Cutting models for tensor parallelism, with the ranks as threads: each model cut equals the whole one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny import tiny_llama, tiny_model
from torch import Tensor, nn
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from gammaray.engine import sharding
from gammaray.errors import ConfigError

GEMMA = {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
SERVED = {
    "llama": (LlamaConfig, {}),
    "llama with biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "mistral": (MistralConfig, {"sliding_window": 6}),
    "gemma3": (Gemma3TextConfig, GEMMA),
}


class Ranks:
    """Threads that sum as ranks do, always in the order of ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def total(self, rank: int, x: Tensor) -> Tensor:
        self.parts[rank] = x
        self.barrier.wait()
        summed = torch.stack(self.parts).sum(0)
        self.barrier.wait()
        return summed

    @torch.no_grad()
    def logits(self, models: list[PreTrainedModel], tokens: Tensor) -> list[Tensor]:
        def run(rank: int) -> Tensor:
            part = sharding.cut(models[rank], rank, self.size, lambda x: self.total(rank, x))
            with torch.no_grad():  # it is a setting of each thread
                return part(input_ids=tokens, use_cache=False).logits

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(run, range(self.size)))


def made(config: Any, **options: Any) -> PreTrainedModel:
    """With biases that are not 0."""
    model = tiny_model(config, **{"num_key_value_heads": 4, **options})
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data = 0.3 * torch.randn(module.bias.shape, generator=generator)
    return model


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SERVED)
def test_the_parts_together_compute_the_whole(name: str, size: int) -> None:
    config, options = SERVED[name]
    tokens = torch.arange(20)[None] * 7 % 32
    with torch.no_grad():
        expected = made(config, **options)(input_ids=tokens, use_cache=False).logits
    for logits in Ranks(size).logits([made(config, **options) for _ in range(size)], tokens):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_rank_keeps_its_share_of_every_cut_matrix_and_no_view_of_the_whole() -> None:
    part = sharding.cut(tiny_llama(layers=1), 1, 2, lambda x: x)
    attention, mlp = part.model.layers[0].self_attn, part.model.layers[0].mlp
    shapes = [tuple(m.weight.shape) for m in (attention.q_proj, attention.k_proj, mlp.gate_proj)]
    assert shapes == [(16, 32), (8, 32), (24, 32)]
    assert [tuple(m.inner.weight.shape) for m in (attention.o_proj, mlp.down_proj)] == [(32, 16), (32, 24)]
    for weight in (attention.q_proj.weight, mlp.down_proj.inner.weight):
        assert weight.untyped_storage().nbytes() == weight.nbytes


@pytest.mark.parametrize(
    "config, options, size, message",
    [
        (LlamaConfig, {}, 3, "3 does not divide the 4 attention heads and 2 key-value heads.*use 1 or 2"),
        (LlamaConfig, {}, 4, "4 does not divide the 4 attention heads and 2 key-value heads.*use 1 or 2"),
        (LlamaConfig, {"intermediate_size": 45}, 2, "2 does not divide the 45 outputs of layers.0.mlp.gate"),
        (GPT2Config, {}, 2, "GPT2LMHeadModel has no tensor-parallel plan"),
        (Phi3Config, {}, 2, "Phi3ForCausalLM cuts layers.*qkv_proj by 'colwise_gather_output', which is not"),
        (MixtralConfig, {"num_local_experts": 2}, 2, "MixtralForCausalLM cuts layers.*experts.* by 'packed"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_words(
    config: Any, options: dict[str, Any], size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sharding.cut(tiny_model(config, **options), 0, size, lambda x: x)


def test_a_layer_that_is_no_plain_linear_is_refused() -> None:
    class Quantised(nn.Linear):
        pass

    model = tiny_llama()
    model.model.layers[1].mlp.up_proj = Quantised(32, 48)
    with pytest.raises(ConfigError, match=r"layers.1.mlp.up_proj of LlamaForCausalLM is a Quantised"):
        sharding.cut(model, 0, 2, lambda x: x)


def test_a_plan_that_names_nothing_is_refused() -> None:
    model = tiny_llama()
    model.config.base_model_tp_plan = {"blocks.*.q": "colwise"}
    with pytest.raises(ConfigError, match="names no module that it has"):
        sharding.cut(model, 0, 2, lambda x: x)
