"""MTP layers in public layouts, on the architectures that have them, against transformers' own layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import heads
from tiny import tiny_llama, tiny_model
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from gammaray.drafter_config import MtpDrafter
from gammaray.engine.batch import Row
from gammaray.engine.drafters import mtp
from gammaray.engine.drafters.base import DraftView
from gammaray.engine.drafters.registry import Making
from gammaray.engine.loading import load_runner
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError
from gammaray.types import SamplingParams

VOCAB, LAYERS = 32, 2
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
}
DEEPSEEK = {
    **EXPERTS,
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
}
GLM = {**EXPERTS, "head_dim": 8, "first_k_dense_replace": 1}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
# configuration, what is special, layout
FAMILIES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "deepseek_v3": (DeepseekV3Config, DEEPSEEK, "deepseek"),
    "glm4_moe": (Glm4MoeConfig, GLM, "deepseek"),
    "qwen3": (Qwen3Config, {"head_dim": 8}, "qwen3_next"),
    "qwen3_moe": (Qwen3MoeConfig, QWEN_MOE, "qwen3_next"),
    "qwen2": (Qwen2Config, {}, "mimo"),
    "llama": (LlamaConfig, {}, "mimo"),
}


@dataclass(frozen=True)
class Family:
    """A target, and a model of one more layer: its last is the MTP layer."""

    target: PreTrainedModel
    donor: PreTrainedModel
    layout: str
    tensors: dict[str, Tensor]  # of the MTP layer, as a checkpoint has them
    runner: ModelRunner
    path: str

    def making(self, path: str | None = None) -> Making:
        config = MtpDrafter(method="mtp", path=path, tree="static")
        return Making("head", config, self.runner, self.path, tokenizer=None)  # type: ignore[arg-type]

    def checkpoint(self, folder: Path) -> str:
        return heads.write(folder, self.tensors)


def family(name: str, folder: Path) -> Family:
    kind, special, layout = FAMILIES[name]
    target = tiny_model(kind, VOCAB, LAYERS, **special)
    donor = tiny_model(kind, VOCAB, LAYERS + 1, seed=9, **special)
    target.save_pretrained(folder / "target")
    donor.save_pretrained(folder / "donor")  # experts one by one, as checkpoints have them
    last = f"model.layers.{LAYERS}."
    saved = load_file(folder / "donor" / "model.safetensors")
    layer = {key.removeprefix(last): x for key, x in saved.items() if key.startswith(last)}
    runner = load_runner(target, "float32", block_size=4, num_blocks=32)
    tensors = heads.mtp(target, layout, layer, shared=layout == "deepseek")
    return Family(target, donor, layout, tensors, runner, str(folder / "target"))


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@torch.no_grad()
def chances(own: Family, path: list[int]) -> Tensor:
    """[V] behind `path`, drafted behind TOKENS: one dense pass for each token of it."""
    prefix, enorm, hnorm, projection, norm, _ = heads.MTP_NAMES[own.layout]
    prefix, eps = prefix.format(layers=LAYERS), own.target.config.rms_norm_eps
    weight = {key.removeprefix(prefix): x for key, x in own.tensors.items()}
    model, layer = own.target, own.donor.model.layers[-1]
    whole = TOKENS[1:]
    states = model(torch.tensor([TOKENS[:-1]]), use_cache=False, output_hidden_states=True).hidden_states[-1]
    for token in [*path, None]:
        embedded = normed(model.get_input_embeddings().weight[whole], weight[f"{enorm}.weight"], eps)
        state = normed(states[0], weight[f"{hnorm}.weight"], eps)
        both = [state, embedded] if own.layout == "mimo" else [embedded, state]
        x = (torch.cat(both, -1) @ weight[f"{projection}.weight"].T)[None]
        positions = torch.arange(len(whole))[None]
        mask = torch.full((len(whole), len(whole)), float("-inf")).triu(1)[None, None]
        rotation = own.donor.model.rotary_emb(x, positions)
        x = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        behind = normed(x[0], weight[f"{norm}.weight"], eps)
        if token is not None:
            whole, states = [*whole, token], torch.cat([states, behind[None, -1:]], 1)
    logits: Tensor = model.get_output_embeddings()(behind[-1])
    return logits.softmax(-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layout_drafts_what_the_architectures_own_layer_says(tmp_path: Path, name: str) -> None:
    """A wrong order of the inputs, experts that are mixed up, or a state without its norm change it all."""
    own = family(name, tmp_path)
    drafter = mtp.make(own.making(own.checkpoint(tmp_path / "head")))
    _, features = own.runner.forward_features([Row(TOKENS, 0, [5, 2, 9])], drafter.layers)
    drafter.catch_up("r", TOKENS)
    drafter.commit("r", TOKENS[1:], features[:-1])
    view = DraftView("r", len(TOKENS), 3, 2, SamplingParams(temperature=0.0), sequence=0)
    tree = drafter.collect(drafter.begin([view]), 0.0)["r"]
    assert tree.depth == 3 and tree.confidence is not None
    paths: list[list[int]] = []
    for token, parent, confidence in zip(tree.tokens, tree.parents, tree.confidence, strict=True):
        above = paths[parent] if parent >= 0 else []
        paths.append([*above, token])
        assert confidence == pytest.approx(chances(own, above)[token].item(), rel=2e-3), paths[-1]


def test_the_targets_own_checkpoint_is_where_layers_are_looked_for(tmp_path: Path) -> None:
    own = family("qwen2", tmp_path)
    with pytest.raises(ConfigError, match="ships no MTP layer"):
        mtp.make(own.making())
    heads.write(Path(own.path) / "more", own.tensors)
    (Path(own.path) / "more" / "model.safetensors").rename(Path(own.path) / "model-mtp.safetensors")
    assert mtp.make(own.making()).layers == (LAYERS + 1,)


def test_a_layer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    own = family("deepseek_v3", tmp_path)
    other = dict(tiny_llama(VOCAB, layers=1).model.layers[0].state_dict())
    wrong = heads.mtp(own.target, "deepseek", other)
    with pytest.raises(ConfigError, match=r"lacks layer\.mlp"):
        mtp.make(own.making(heads.write(tmp_path / "wrong", wrong)))
    quantised = own.tensors | {f"model.layers.{LAYERS}.eh_proj.weight_scale_inv": torch.ones(1)}
    with pytest.raises(ConfigError, match="weight_scale_inv"):
        mtp.make(own.making(heads.write(tmp_path / "quantised", quantised)))
