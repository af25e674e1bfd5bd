"""EAGLE heads against a dense reference of their own, their public layouts, and their pairs of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import heads
from support.decoding import Driver
from support.tape import Letters
from tiny import tiny_llama
from torch import Tensor
from transformers import PreTrainedModel

from gammaray.drafter_config import Eagle3Drafter, EagleDrafter
from gammaray.engine.batch import Row
from gammaray.engine.drafters import eagle, eagle3
from gammaray.engine.drafters.base import DraftView
from gammaray.engine.drafters.features import FED_AT_ONCE, FeatureDrafter, paired
from gammaray.engine.drafters.registry import Making
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.loading import load_runner
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError, VocabularyMismatch
from gammaray.types import GenerateRequest, SamplingParams, SpeculationPlan

VOCAB, LAYERS, BLOCK = 32, 6, 4
DRAFT_TOKENS = [token for token in range(VOCAB) if token % 3]
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
READ = (2, 3, 3)  # of the target's layers: 2, half of them, and the third from the end
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_llama(VOCAB, layers=LAYERS)


@cache
def running(target: PreTrainedModel) -> ModelRunner:
    return load_runner(target, "float32", block_size=BLOCK, num_blocks=64)


def making(target: PreTrainedModel, method: str, path: str, **options: Any) -> Making:
    kind, runner = {"eagle": EagleDrafter, "eagle3": Eagle3Drafter}[method], running(target)
    config = kind(method=method, path=path, **{"tree": "static", **options})
    return Making("head", config, runner, "unused", tokenizer=None)  # type: ignore[arg-type]


def make(target: PreTrainedModel, method: str, path: str, **options: Any) -> FeatureDrafter:
    module = {"eagle": eagle, "eagle3": eagle3}[method]
    return module.make(making(target, method, path, **options))


def write(folder: Path, target: PreTrainedModel, method: str) -> str:
    tensors = heads.eagle(target) if method == "eagle" else heads.eagle3(target, DRAFT_TOKENS)
    return heads.write(folder, tensors, heads.settings(target))


# The reference: whole sequences, no pages, no transformers ------------------------------------------------


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate(x: Tensor, theta: float = 10000.0) -> Tensor:
    """x [T, H, D] of positions 0, 1, ...: dimensions i and i + D/2 are a pair (arXiv 2104.09864, eq. 34)."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None, None] * theta ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def attend(x: Tensor, w: dict[str, Tensor], heads: int, kv_heads: int) -> Tensor:
    """x [T, R] -> [T, H], causal."""
    q, k, v = (
        F.linear(x, w[f"self_attn.{name}_proj.weight"]).view(len(x), count, -1)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (rotate(k), v))
    scores = torch.einsum("ihd,jhd->hij", rotate(q), k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).tril() == 0, float("-inf"))
    out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
    return F.linear(out, w["self_attn.o_proj.weight"])


def mlp(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    gate, up = (F.linear(x, w[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return F.linear(F.silu(gate) * up, w["mlp.down_proj.weight"])


class Reference:
    """A head by its checkpoint's keys, one method a paper."""

    def __init__(self, target: PreTrainedModel, tensors: dict[str, Tensor], layer: str) -> None:
        self.target, self.config, self.tensors = target, target.config, tensors
        self.layer = {key.removeprefix(layer): x for key, x in tensors.items() if key.startswith(layer)}

    def embed(self, tokens: list[int]) -> Tensor:
        return self.target.get_input_embeddings().weight[tokens]

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.layer[name] if name in self.layer else self.tensors[name]
        return norm(x, weight, self.config.rms_norm_eps)

    def attend(self, x: Tensor) -> Tensor:
        config = self.config
        return attend(x, self.layer, config.num_attention_heads, config.num_key_value_heads)

    def eagle(self, tokens: list[int], states: Tensor) -> Tensor:
        both = torch.cat([self.embed(tokens), states], -1)
        x = F.linear(both, self.tensors["fc.weight"], self.tensors["fc.bias"])
        x = x + self.attend(x)
        return x + mlp(self.norm(x, "post_attention_layernorm.weight"), self.layer)

    def eagle3(self, tokens: list[int], states: Tensor) -> Tensor:
        embedded = self.norm(self.embed(tokens), "input_layernorm.weight")
        x = states + self.attend(torch.cat([embedded, self.norm(states, "hidden_norm.weight")], -1))
        return x + mlp(self.norm(x, "post_attention_layernorm.weight"), self.layer)

    def likeliest(self, method: str, states: Tensor) -> list[tuple[int, float]]:
        """Tokens and log-probabilities behind the last of `states`, the best first."""
        if method == "eagle":
            logits, names = self.target.get_output_embeddings().weight @ states[-1], range(VOCAB)
        else:
            normed = self.norm(states[-1], "norm.weight")
            logits, names = self.tensors["lm_head.weight"] @ normed, DRAFT_TOKENS
        found = logits.log_softmax(-1)
        return sorted(zip(names, found.tolist(), strict=True), key=lambda pair: -pair[1])

    def first(self, method: str, tokens: list[int]) -> Tensor:
        """The target's states that the head begins with, [len(tokens) - 1, H]."""
        ids = torch.tensor([tokens[:-1]])
        given = self.target(ids, use_cache=False, output_hidden_states=True).hidden_states
        if method == "eagle":
            return given[-1][0]
        fused = torch.cat([given[layer][0] for layer in READ], -1)
        return F.linear(fused, self.tensors["fc.weight"])


@torch.no_grad()
def expected(
    reference: Reference, method: str, tokens: list[int], path: list[int]
) -> list[tuple[int, float]]:
    """What the head says behind `path`, drafted behind `tokens`."""
    forward: Callable[[list[int], Tensor], Tensor] = getattr(reference, method)
    states = reference.first(method, tokens)
    whole = tokens[1:]
    for token in [*path, None]:
        behind = forward(whole, states)
        if token is not None:
            whole, states = [*whole, token], torch.cat([states, behind[-1:]])
    return reference.likeliest(method, behind)


def feed(
    drafter: FeatureDrafter, runner: ModelRunner, tokens: list[int], blocks: list[int], rid: str = "r"
) -> None:
    """What the engine does for a prompt, in two chunks."""
    drafter.catch_up(rid, tokens)
    known = drafter.length(rid)
    assert known is not None
    _, features = runner.forward_features([Row(tokens, 0, blocks)], drafter.layers)
    cut = max(known + 1, len(tokens) // 2)
    drafter.commit(rid, tokens[known:cut], features[known - 1 : cut - 1])
    drafter.commit(rid, tokens[cut:], features[cut - 1 : -1])


def view(rid: str, length: int, depth: int, width: int) -> DraftView:
    return DraftView(rid, length, depth, width, GREEDY, sequence=0)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_drafts_what_a_dense_forward_of_the_paper_says(
    tmp_path: Path, target: PreTrainedModel, method: str
) -> None:
    """Wrong norms, residuals, positions, ancestors or states between levels all change a log-probability."""
    made = making(target, method, write(tmp_path, target, method))
    drafter = {"eagle": eagle, "eagle3": eagle3}[method].make(made)
    feed(drafter, made.target, TOKENS, [7, 2, 9])
    tree = drafter.collect(drafter.begin([view("r", len(TOKENS), 3, 3)]), 0.0)["r"]
    layer = "layers.0." if method == "eagle" else "midlayer."
    tensors = heads.eagle(target) if method == "eagle" else heads.eagle3(target, DRAFT_TOKENS)
    reference = Reference(target, tensors, layer)
    assert tree.confidence is not None and tree.depth == 3
    paths: list[list[int]] = []
    for token, parent, confidence in zip(tree.tokens, tree.parents, tree.confidence, strict=True):
        above = paths[parent] if parent >= 0 else []
        paths.append([*above, token])
        chances = dict(expected(reference, method, TOKENS, above))
        assert confidence == pytest.approx(torch.tensor(chances[token]).exp().item(), rel=1e-3), paths[-1]
    best = [token for token, _ in expected(reference, method, TOKENS, [])[:3]]
    assert [path[0] for path in paths if len(path) == 1] == best


# Layouts ---------------------------------------------------------------------------------------------------


def confidences(drafter: FeatureDrafter, runner: ModelRunner) -> list[float]:
    feed(drafter, runner, TOKENS, [7, 2, 9])
    tree = drafter.collect(drafter.begin([view("r", len(TOKENS), 2, 3)]), 0.0)["r"]
    assert tree.confidence is not None
    return [*map(float, tree.tokens), *tree.confidence]


def layouts(target: PreTrainedModel, folder: Path) -> dict[str, str]:
    """One EAGLE-3 head as its projects write it."""
    tensors = heads.eagle3(target, DRAFT_TOKENS)
    others = {key.replace("midlayer.", "layers.0."): x for key, x in tensors.items()}
    table = {"embed_tokens.weight": target.get_input_embeddings().weight.detach().clone()}
    flat, nested = heads.settings(target), {"transformer_layer_config": heads.settings(target)}
    specforge = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in READ]}}
    speculators = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": list(READ)}
    return {
        "eagle3": heads.write(folder / "a", tensors, flat),
        "pickled": heads.write(folder / "b", tensors, flat, pickled=True),
        "specforge": heads.write(folder / "c", tensors | table, flat | specforge),
        "speculators": heads.write(folder / "d", others | table, nested | speculators),
    }


def test_all_public_layouts_of_one_head_are_the_same_head(tmp_path: Path, target: PreTrainedModel) -> None:
    """A key that is overlooked, or layers counted from elsewhere, would be another head."""
    made = {name: making(target, "eagle3", path) for name, path in layouts(target, tmp_path).items()}
    found = {name: confidences(eagle3.make(one), one.target) for name, one in made.items()}
    for name in made:
        assert found[name] == pytest.approx(found["eagle3"], rel=1e-5), name


def test_its_own_embedding_layers_and_residual_are_used(tmp_path: Path, target: PreTrainedModel) -> None:
    tensors, plain = heads.eagle3(target, DRAFT_TOKENS), heads.settings(target)
    table = {"embed_tokens.weight": heads.Random(1).matrix(VOCAB, target.config.hidden_size)}
    forms = [
        (tensors, plain),
        (tensors | table, plain),
        (tensors, plain | {"norm_before_residual": True}),
        (tensors, plain | {"hidden_act": "relu"}),
        (tensors, plain | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}),
        (tensors | {"midlayer.self_attn.q_proj.bias": torch.ones(32)}, plain),
    ]
    found = set()
    for index, (own, config) in enumerate(forms):
        made = making(target, "eagle3", heads.write(tmp_path / str(index), own, config))
        found.add(tuple(confidences(eagle3.make(made), made.target)))
    assert len(found) == len(forms)


BAD: dict[str, tuple[str, Callable[[dict[str, Tensor], dict[str, Any]], Any], str]] = {
    "missing": ("eagle3", lambda w, c: w.pop("midlayer.hidden_norm.weight"), "lacks layer.hidden_norm"),
    "unknown": ("eagle3", lambda w, c: w.update({"q_norm": torch.ones(2)}), "unknown q_norm"),
    "shape": (
        "eagle3",
        lambda w, c: w.update({"fc.weight": torch.ones(32, 64)}),
        r"\[32, 64\] where \[32, 96\]",
    ),
    "eagle": ("eagle", lambda w, c: w.pop("fc.weight"), "lacks fc.weight"),
    "hidden": ("eagle", lambda w, c: c.update(hidden_size=64), "hidden_size 64, the target 32"),
    "type": ("eagle", lambda w, c: c.update(model_type="qwen3"), "'qwen3': only llama"),
    "layers": ("eagle3", lambda w, c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), "it has 6"),
    "option": ("eagle3", lambda w, c: c.update(norm_before_fc=True), "norm_before_fc"),
    "d2t": ("eagle3", lambda w, c: w.pop("d2t"), "no d2t"),
    "vocabulary": ("eagle3", lambda w, c: (w.pop("d2t"), w.pop("lm_head.weight")), "neither lm_head"),
    "rows": ("eagle3", lambda w, c: (w.pop("lm_head.weight"), w["d2t"].add_(99)), "different tokens"),
    "int8": ("eagle3", lambda w, c: w.update({"fc.weight": w["fc.weight"].char()}), "fc.weight_scale"),
    "double": ("eagle3", lambda w, c: w["d2t"][1].sub_(1), "different tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_the_target_is_refused(tmp_path: Path, target: PreTrainedModel, name: str) -> None:
    method, spoil, message = BAD[name]
    tensors = heads.eagle(target) if method == "eagle" else heads.eagle3(target, DRAFT_TOKENS)
    config = heads.settings(target)
    spoil(tensors, config)
    with pytest.raises(ConfigError, match=message):
        make(target, method, heads.write(tmp_path, tensors, config))


def test_another_vocabulary_is_refused(tmp_path: Path, target: PreTrainedModel) -> None:
    path = heads.write(tmp_path, heads.eagle(target), heads.settings(target, vocab_size=VOCAB + 1))
    with pytest.raises(VocabularyMismatch):
        make(target, "eagle", path)
    with pytest.raises(ConfigError, match="no such file"):
        make(target, "eagle", str(tmp_path / "nowhere"))


def test_a_bias_of_one_projection_is_none_of_the_others(tmp_path: Path, target: PreTrainedModel) -> None:
    """Queries, keys and values are one matrix, where the others' share must be 0."""
    tensors, config = heads.eagle3(target, DRAFT_TOKENS), heads.settings(target)
    tensors["midlayer.self_attn.q_proj.bias"] = torch.ones(32)
    zeros = {f"midlayer.self_attn.{name}_proj.bias": torch.zeros(16) for name in "kv"}
    folders = [heads.write(tmp_path / str(len(own)), tensors | own, config) for own in ({}, zeros)]
    one, other = (making(target, "eagle3", folder) for folder in folders)
    found = [confidences(eagle3.make(made), made.target) for made in (one, other)]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_without_lm_head_it_reads_with_rows_of_the_targets_head(
    tmp_path: Path, target: PreTrainedModel
) -> None:
    """Other rows, or rows in another order, would be another head. The target's is not its embedding."""
    tensors, config = heads.eagle3(target, DRAFT_TOKENS), heads.settings(target)
    tensors["lm_head.weight"] = target.get_output_embeddings().weight.detach()[DRAFT_TOKENS].clone()
    whole = making(target, "eagle3", heads.write(tmp_path / "whole", tensors, config))
    del tensors["lm_head.weight"]
    shared = making(target, "eagle3", heads.write(tmp_path / "shared", tensors, config))
    one, other = (confidences(eagle3.make(made), made.target) for made in (whole, shared))
    assert one == pytest.approx(other, rel=1e-5)


def test_a_head_in_16_bits_beside_a_target_in_32_drafts_nearly_the_same(
    tmp_path: Path, target: PreTrainedModel
) -> None:
    """Its pages too are of its own dtype: bfloat16 keys cannot be written to the target's kind of pool."""
    path = heads.write(tmp_path, heads.lean_eagle3(target, DRAFT_TOKENS), heads.settings(target))
    own, narrow = (making(target, "eagle3", path, dtype=dtype) for dtype in (None, "bfloat16"))
    one, other = (confidences(eagle3.make(made), made.target) for made in (own, narrow))
    assert one != other and one == pytest.approx(other, abs=0.1)


# Pairs and pages -------------------------------------------------------------------------------------------


def test_a_block_is_shared_only_where_the_next_token_is_the_same_too(
    tmp_path: Path, target: PreTrainedModel
) -> None:
    """Keyed by its own tokens, the block that ends with TOKENS[7] would serve both continuations."""
    made = making(target, "eagle3", write(tmp_path, target, "eagle3"))
    drafter = eagle3.make(made)
    other = [*TOKENS[: 2 * BLOCK], TOKENS[2 * BLOCK] + 1, *TOKENS[2 * BLOCK + 1 :]]
    trees = {}
    for rid, tokens in (("cold", TOKENS), ("same", TOKENS), ("other", other)):
        feed(drafter, made.target, tokens, [7, 2, 9], rid)
        trees[rid] = drafter.collect(drafter.begin([view(rid, len(tokens), 2, 3)]), 0.0)[rid]
        if rid == "cold":
            drafter.catch_up("probe", tokens)
            drafter.catch_up("others", other)
            assert (drafter.length("probe"), drafter.length("others")) == (2 * BLOCK + 1, BLOCK + 1)
    alone = eagle3.make(made)
    feed(alone, made.target, other, [7, 2, 9], "other")
    fresh = alone.collect(alone.begin([view("other", len(other), 2, 3)]), 0.0)["other"]
    for one, two in ((trees["same"], trees["cold"]), (trees["other"], fresh)):
        assert one.confidence is not None and two.confidence is not None
        assert one.tokens == two.tokens and one.confidence == pytest.approx(two.confidence, rel=1e-5)
    for rid in ("cold", "same", "other", "probe", "others"):
        drafter.release(rid)
    assert drafter.cache.pool.used == 0 and drafter.cache.pool.audit([]) is None


def test_pairs_tell_both_tokens_apart() -> None:
    assert paired([1, 2, 3]) == [1 << 32 | 2, 2 << 32 | 3] and paired([5]) == paired([]) == []


def test_a_small_pool_costs_drafts_and_never_fails(tmp_path: Path, target: PreTrainedModel) -> None:
    """Long prompts are fed as they come, many sequences want more pages than there are, prefixes are shared.

    The guard around drafters would hide what they raise.
    """
    made = making(target, "eagle", write(tmp_path, target, "eagle"), tree="dynamic")
    drafter = eagle.make(made)
    engine = Engine(
        made.target,
        Letters(),
        (),
        {"head": drafter},
        EngineOptions(max_batch=6, token_budget=2 * FED_AT_ONCE, oracle=True),
    )
    driver = Driver(engine)
    prompt = tuple(i * 7 % VOCAB for i in range(FED_AT_ONCE + 20))
    requests = [
        GenerateRequest(
            str(i),
            (*prompt[: 84 - 13 * i], i),
            SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
            SpeculationPlan("head", 4, 3),
        )
        for i in range(6)
    ]
    driver.submit(requests)
    for _ in range(3):
        driver.step()
    held = drafter.cache.pool.used
    driver.finish()
    assert held > 0 and drafter.cache.pool.used == 0 and drafter.cache.pool.audit([]) is None
    assert sum(report.drafter_failures for report in driver.reports) == 0
    stats = [outcome.stats for outcome in driver.outcomes.values()]
    assert all(one is not None and one.drafted > 0 for one in stats)
