"""The target's first layers as its drafter: what it may share, what it writes, and what that saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.registered import LENGTH, VOCAB, save, target
from tiny import tiny_llama, tiny_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig

from gammaray.config import Config, parse
from gammaray.engine.batch import Row
from gammaray.engine.build import build_drafter
from gammaray.engine.drafters.base import DraftTree, DraftView
from gammaray.engine.drafters.layer_exit import LayerExitDrafter
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.drafters.tree_maker import TreeMaker
from gammaray.engine.loading import load_runner, load_tokenizer
from gammaray.engine.runner import ModelRunner
from gammaray.engine.validate import validate
from gammaray.errors import ConfigError, VocabularyMismatch
from gammaray.types import SamplingParams

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
GEMMA = {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "gemma3": (Gemma3TextConfig, GEMMA),
    "gpt2": (GPT2Config, {}),
}


def config(folder: Path, drafters: dict[str, dict[str, Any]], **more: Any) -> Config:
    model = save(folder / "target", target())
    kv = {"num_blocks": 32, "block_size": 4}
    return parse(
        {"target": {"model": model, "dtype": "float32", "kv": kv, **more}, "drafters": drafters}, "test"
    )


def build(settings: Config, name: str = "exit") -> tuple[Any, ModelRunner]:
    own = settings.target
    runner = load_runner(
        own.model, "float32", own.kv.block_size, own.kv.num_blocks, deterministic=own.deterministic
    )
    return build_drafter(name, settings, runner, load_tokenizer(own.model)), runner


# The runner over the first layers -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_first_layers_write_the_targets_kv_and_leave_the_target_whole(kind: str) -> None:
    """A shell that shares its list of layers with the target would cut the target itself."""
    cls, options = KINDS[kind]
    runner = load_runner(tiny_model(cls, layers=4, **options), "float32", block_size=4, num_blocks=8)
    logits, kv = runner.dense(TOKENS)
    first = runner.first(2)
    shorter, own = first.dense(TOKENS)
    assert (first.num_layers, len(own)) == (2, 2)
    for mine, theirs in zip(own, kv, strict=False):
        torch.testing.assert_close(mine, theirs)
    assert not torch.allclose(shorter, logits, atol=1e-2)
    again, whole = runner.dense(TOKENS)
    assert torch.equal(again, logits) and len(whole) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_they_end_in_the_norm_and_head_that_they_are_given(kind: str) -> None:
    cls, options = KINDS[kind]
    whole = tiny_model(cls, layers=4, tie_word_embeddings=False, **options)
    end = tiny_model(cls, layers=2, seed=9, tie_word_embeddings=False, **options)
    own = end.state_dict()
    shared = {
        key: value for key, value in whole.state_dict().items() if "norm." not in key or "layers" in key
    }
    end.load_state_dict(
        {key: shared[key] if "head" not in key and key in shared else own[key] for key in own}
    )
    runner = load_runner(whole, "float32", block_size=4, num_blocks=8)
    with torch.no_grad():
        expected = end(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    found, _ = runner.first(2, end).dense(TOKENS)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layers", [4, 5])
def test_fewer_layers_than_the_target_has(tmp_path: Path, layers: int) -> None:
    with pytest.raises(ConfigError, match="the target has 4, so use 1 to 3"):
        build(config(tmp_path, {"exit": {"method": "layer_exit", "layers": layers}}))


# Sharing ------------------------------------------------------------------------------------------------


def exiting(folder: Path, **changes: Any) -> str:
    """A checkpoint of the target's first two layers with another head; `changes` to its configuration."""
    own, whole = tiny_llama(VOCAB, layers=2, seed=7, max_position_embeddings=LENGTH), target()
    own.model.embed_tokens, own.model.layers = whole.model.embed_tokens, whole.model.layers[:2]
    name = save(folder, own)
    if changes:
        own.config.update(changes)
        own.config.save_pretrained(folder)
    return name


def refusal(tmp_path: Path, path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        build(config(tmp_path, {"exit": {"method": "layer_exit", "layers": 2, "path": path}}))
    assert "method: model recomputes it" in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}}, "RoPE theta 20000.0"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}},
            "RoPE scaling {'factor': 2.0, 'rope_type': 'linear'}",
        ),
        ({"position_offset": 2}, "position offset 2"),
    ],
)
def test_kv_of_other_positions_is_not_shared(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    message = refusal(tmp_path, exiting(tmp_path / "own", **changes))
    assert named in message
    assert message.count("the target's is") == 1  # nothing else differs


def test_kv_of_other_weights_is_not_shared(tmp_path: Path) -> None:
    """One number in the second layer."""
    name = exiting(tmp_path / "own")
    model = AutoModelForCausalLM.from_pretrained(name)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] += 1e-3
    model.save_pretrained(name)
    message = refusal(tmp_path, name)
    assert "prefix hash" in message and message.count("the target's is") == 1


def test_kv_of_other_heads_is_not_shared(tmp_path: Path) -> None:
    other = tiny_llama(VOCAB, layers=2, num_key_value_heads=4, max_position_embeddings=LENGTH)
    assert "heads (of queries, of keys and values, size) (4, 4, 8)" in refusal(
        tmp_path, save(tmp_path / "o", other)
    )


def test_a_head_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "other", tiny_llama(VOCAB + 1, layers=2))
    with pytest.raises(VocabularyMismatch):
        build(config(tmp_path, {"exit": {"method": "layer_exit", "layers": 2, "path": path}}))


def test_a_target_that_is_cut_runs_whole_passes_only(tmp_path: Path) -> None:
    settings = config(tmp_path, {"exit": {"method": "layer_exit", "layers": 2}}, tensor_parallel=2)
    with pytest.raises(ConfigError, match=r"'exit'.*needs tensor_parallel: 1"):
        build(settings)
    failed = [check.name for check in validate(settings) if not check.ok]
    assert failed == ["drafter exit"]


# The target's pages -------------------------------------------------------------------------------------


def view(rid: str, length: int, blocks: list[int], depth: int = 3, width: int = 2) -> DraftView:
    return DraftView(rid, length, depth, width, SamplingParams(temperature=0.0), 0, blocks=blocks)


def prefilled(kind: str = "static") -> tuple[ModelRunner, LayerExitDrafter]:
    """Two sequences that share their first block; the last token of each has no KV yet."""
    runner = load_runner(target(), "float32", block_size=4, num_blocks=16)
    for k, v in runner._pool.layers:
        k.zero_(), v.zero_()
    runner.forward([Row(TOKENS[:9], 0, [5, 2, 9], logits=0)])
    runner.forward([Row([7, 8], 4, [5, 11], logits=0)])
    drafter = LayerExitDrafter(runner.first(2), TreeMaker(kind))  # type: ignore[arg-type]
    drafter.catch_up("a", TOKENS)
    drafter.catch_up("b", [*TOKENS[:4], 7, 8, 9])
    return runner, drafter


def draft(drafter: LayerExitDrafter, *views: DraftView) -> dict[str, DraftTree]:
    return dict(drafter.collect(drafter.begin(views), 0.0))


@pytest.mark.parametrize("kind", ["static", "dynamic", "sequoia"])
def test_a_draft_writes_its_own_slots_in_its_own_layers_and_nothing_else(kind: str) -> None:
    runner, drafter = prefilled(kind)
    before = [(k.clone(), v.clone()) for k, v in runner._pool.layers]
    assert set(draft(drafter, view("a", 10, [5, 2, 9, 0, 1]), view("b", 7, [5, 11, 3, 4]))) == {"a", "b"}
    allowed = {9 * 4 + 1, 9 * 4 + 2, 9 * 4 + 3, *range(4)}  # slots 9 to 15 of a, its last token's first
    allowed |= {11 * 4 + 2, 11 * 4 + 3, 3 * 4, 3 * 4 + 1, 3 * 4 + 2, 3 * 4 + 3, 4 * 4}  # 6 to 12 of b
    for layer, (old, new) in enumerate(zip(before, runner._pool.layers, strict=True)):
        changed = (old[0] != new[0]).flatten(0, 1).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= (allowed if layer < 2 else set())
        assert layer >= 2 or {9 * 4 + 1, 11 * 4 + 2} <= set(changed)


def test_verification_writes_what_the_draft_wrote() -> None:
    """So nothing has to be moved, or taken back, whatever is accepted."""
    runner, drafter = prefilled()
    blocks = [5, 2, 9, 0, 1]
    tree = draft(drafter, view("a", 10, blocks))["a"]
    slots = [9 * 4 + 1, 9 * 4 + 2, 9 * 4 + 3, 0, 1]  # of the last token and of four nodes, which were fed
    drafted = runner.first(2).read_kv(slots)
    runner.forward([Row(TOKENS[9:], 9, blocks, tree.tokens, tree.parents)])
    for (k, v), (k_whole, v_whole) in zip(drafted, runner.read_kv(slots), strict=False):
        torch.testing.assert_close(k, k_whole, atol=1e-5, rtol=0)
        torch.testing.assert_close(v, v_whole, atol=1e-5, rtol=0)


def test_what_the_target_has_no_slots_or_positions_for_gets_no_draft() -> None:
    _, drafter = prefilled()
    assert draft(drafter, view("a", 10, [5, 2, 9])) == {}  # 16 slots in 12
    assert draft(drafter, view("a", 10, [5, 2, 9, 0])) != {}
    assert draft(drafter, view("a", 9, [5, 2, 9, 0])) == {}  # at another length
    drafter.catch_up("a", [0] * (LENGTH - 1))
    assert draft(drafter, view("a", LENGTH - 1, list(range(16)) * 2)) == {}


def test_sequences_share_passes_and_get_what_they_would_alone() -> None:
    _, drafter = prefilled()
    views = view("a", 10, [5, 2, 9, 0, 1]), view("b", 7, [5, 11, 3, 4], depth=2)
    together = draft(drafter, *views)
    for one in views:
        alone = draft(drafter, one)[one.rid]
        assert (alone.tokens, alone.parents) == (together[one.rid].tokens, together[one.rid].parents)


# What it saves ------------------------------------------------------------------------------------------


def test_the_saved_kv_is_that_of_a_model_of_the_same_layers(tmp_path: Path) -> None:
    same = save(tmp_path / "same", tiny_llama(VOCAB, layers=2, max_position_embeddings=LENGTH))
    drafters = {
        "exit": {"method": "layer_exit", "layers": 2},
        "model": {"method": "model", "model": same, "dtype": "float32"},
    }
    settings = config(tmp_path, drafters)
    shared, runner = build(settings)
    apart = build_drafter("model", settings, runner, load_tokenizer(settings.target.model))
    assert isinstance(apart, ModelDrafter)
    tensors = [x for pair in apart.runner._pool._stacks for x in pair]
    taken = sum(x.untyped_storage().nbytes() for x in tensors)
    use = shared.kv_use(runner)
    assert (use.own, use.as_model, use.saved) == (0, taken, taken)
    assert apart.runner.kv_bytes_beside(runner) == taken  # the same measure sees a pool of its own
    detail = {check.name: check.detail for check in validate(settings)}["drafter exit"]
    assert detail.startswith("the first 2 of the target's 4 layers over its own pages: 0.0 MiB of KV")
