"""The block drafter against a dense reference, its layouts, its cache, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import block_heads
from support.dense_block import Reference
from support.heads import write
from tiny import tiny_llama
from torch import Tensor
from transformers import PreTrainedModel

from gammaray.drafter_config import DsparkDrafter as Settings
from gammaray.engine.batch import Row
from gammaray.engine.drafters import block_draft, block_model, dspark
from gammaray.engine.drafters.base import DraftTree, DraftView
from gammaray.engine.drafters.registry import Making
from gammaray.engine.loading import load_runner
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError, VocabularyMismatch
from gammaray.types import SamplingParams

VOCAB = 12
FIRST, SECOND = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3, 2]
FORMS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated", "layout": "speculators", "draft_vocab_size": 8},
    "rnn": {"markov_head_type": "rnn"},
    "confidence without Markov": {"confidence_head_with_markov": False},
    "without heads": {"markov_rank": 0, "enable_confidence_head": False},
    "the anchor is not drafted": {"layout": "speculators", "sample_from_anchor": False},
    "dflash": {"layout": "speculators", "speculators_model_type": "dflash"},
}


@dataclass(frozen=True)
class World:
    model: PreTrainedModel
    target: ModelRunner


@pytest.fixture(scope="module")
def world() -> World:
    model = tiny_llama(VOCAB, layers=4, max_position_embeddings=96)
    return World(model, load_runner(model, "float32", block_size=4, num_blocks=24))


def make(world: World, path: str, sampling: bool = True) -> dspark.DsparkDrafter:
    config = Settings(method="dspark", path=path, draft_sampling=sampling)
    return dspark.make(Making("d", config, world.target, "target", None))  # type: ignore[arg-type]


def features(world: World, drafter: dspark.DsparkDrafter, tokens: list[int]) -> Tensor:
    """What the target tells this drafter: [T, F]."""
    rows = [Row(tokens, 0, range(-(-len(tokens) // world.target.block_size)))]
    return world.target.forward_features(rows, drafter.layers)[1]


def begin(drafter: dspark.DsparkDrafter, world: World, rid: str, tokens: list[int], chunk: int = 99) -> None:
    """A sequence whose tokens pass through the target, so many at a time."""
    drafter.catch_up(rid, tokens)
    told = features(world, drafter, tokens)
    known = drafter.length(rid) or 0
    for start in range(known, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        drafter.commit(rid, tokens[start:end], told[start - 1 : end - 1])


def view(
    rid: str, length: int, depth: int = 8, width: int = 1, temperature: float = 1.0, seed: int = 7
) -> DraftView:
    return DraftView(rid, length, depth, width, SamplingParams(temperature=temperature, seed=seed), 0)


def ask(drafter: dspark.DsparkDrafter, *views: DraftView) -> dict[str, DraftTree]:
    return dict(drafter.collect(drafter.begin(views), 0.0))


def built(world: World, folder: Path, form: dict[str, Any]) -> tuple[dspark.DsparkDrafter, Reference]:
    settings = block_heads.dspark_settings(world.model, **form)
    tensors = block_heads.dspark(world.model, settings)
    return make(world, write(folder, tensors, settings)), Reference(world.model, settings, tensors)


def check(tree: DraftTree, reference: Reference, tokens: list[int]) -> None:
    """A sampled chain: exact q at each place, confidences, and as many places as there are."""
    assert len(tree) == reference.places()
    q, sure = reference(tokens, tree.tokens)
    assert tree.q_ids is not None and tree.q_probs is not None and tree.confidence is not None
    told = torch.zeros(len(tree), VOCAB).scatter_(1, tree.q_ids, tree.q_probs)
    torch.testing.assert_close(told, q, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(tree.confidence), sure, atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_it_says_what_a_dense_drafter_says(world: World, tmp_path: Path, form: str) -> None:
    """Two sequences in one batch, one of them in chunks, then another round behind what was committed."""
    drafter, reference = built(world, tmp_path, FORMS[form])
    for rid, tokens, chunk in (("a", FIRST, 3), ("b", SECOND, 9)):
        begin(drafter, world, rid, tokens, chunk)
    trees = ask(drafter, view("a", len(FIRST)), view("b", len(SECOND)))
    for rid, tokens in (("a", FIRST), ("b", SECOND)):
        check(trees[rid], reference, tokens)
    longer = [*FIRST, 7, 2]
    drafter.commit("a", [7, 2], features(world, drafter, longer)[len(FIRST) - 1 : -1])
    check(ask(drafter, view("a", len(longer)))["a"], reference, longer)


def _causal(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = block_model._batch

    def planted(blocks: Any, size: int, device: Any) -> Any:
        batch = whole(blocks, size, device)
        own = torch.tensor([(2 << place) - 1 for place in range(size)]).repeat(len(blocks))
        return replace(batch, ancestors=own[:, None])

    monkeypatch.setattr(block_model, "_batch", planted)


def _without_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_draft.Heads, "_behind", _wrapped(block_draft.Heads._behind))


def _wrapped(behind: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def planted(heads: Any, nodes: Any) -> Tensor:
        behind(heads, nodes)  # for what it keeps
        base = torch.stack([draft.base[draft.growth.depth(node)] for draft, node in nodes])
        return torch.as_tensor(heads.model.spread(base))

    return planted


def _sees_the_drawn_token(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = block_draft.share
    monkeypatch.setattr(block_draft, "share", lambda tree, chances: shared(tree, [*chances[1:], 0.5]))


@pytest.mark.parametrize("plant", [_causal, _without_bias, _sees_the_drawn_token])
def test_what_would_be_wrong_is_seen(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """A causal mask inside the block, no Markov bias, a confidence that knows the token it is about."""
    drafter, reference = built(world, tmp_path, {})
    begin(drafter, world, "a", FIRST)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(ask(drafter, view("a", len(FIRST)))["a"], reference, FIRST)


def test_the_confidence_of_a_sampled_token_is_the_same_whatever_was_drawn(
    world: World, tmp_path: Path
) -> None:
    drafter, _ = built(world, tmp_path, {})
    begin(drafter, world, "a", FIRST)
    trees = [ask(drafter, view("a", len(FIRST), depth=1, width=3, seed=seed))["a"] for seed in range(8)]
    assert len({tree.tokens for tree in trees}) > 1
    assert len({tree.confidence for tree in trees}) == 1


def test_a_tree_has_the_best_tokens_and_its_odds_add_up(world: World, tmp_path: Path) -> None:
    """Greedy: the first path is the reference's own best; siblings share what the first leaves."""
    drafter, reference = built(world, tmp_path, {})
    begin(drafter, world, "a", FIRST)
    tree = ask(drafter, view("a", len(FIRST), depth=3, width=3, temperature=0.0))["a"]
    assert tree.drawn == "deterministic" and len(tree) == 9 and tree.confidence is not None
    for node in range(len(tree)):
        path, at = [tree.tokens[node]], tree.parents[node]
        while at >= 0:
            path, at = [tree.tokens[at], *path], tree.parents[at]
        siblings = [n for n in range(len(tree)) if tree.parents[n] == tree.parents[node]]
        q, sure = reference(FIRST, tuple(path))
        best = q[-1].topk(len(siblings)).indices.tolist()
        assert [tree.tokens[n] for n in siblings] == best
        first, *others = (tree.confidence[n] for n in siblings)
        assert first == pytest.approx(float(sure[-1]), abs=1e-4)
        assert 0 <= sum(others) <= 1 - first + 1e-6


def test_context_is_shared_up_to_the_token_where_sequences_part(world: World, tmp_path: Path) -> None:
    """Its KV knows no next token, so a full block is of use whatever follows it; another tenant gets none.
    Catches a count of what was found for a sequence each time that it waits for a place in vain."""
    drafter, reference = built(world, tmp_path, {})
    begin(drafter, world, "a", FIRST)
    ask(drafter, view("a", len(FIRST)))
    other = [*FIRST[:8], 0, 0]
    drafter.catch_up("b", other, b"tenant")
    assert drafter.length("b") == 1
    drafter.release("b")
    for _ in range(3):  # no room
        drafter.catch_up("b", other)
    begin(drafter, world, "b", other)
    drafter.release("a")
    check(ask(drafter, view("b", len(other)))["b"], reference, other)
    assert drafter.take_reuse().reused == 8
    drafter.release("b")
    assert drafter.cache.pool.used == 0 and drafter.length("b") is None


def test_without_room_or_out_of_step_it_leaves_a_sequence_out(world: World, tmp_path: Path) -> None:
    drafter, _ = built(world, tmp_path, {})
    for rid, tokens in (("a", FIRST), ("b", SECOND), ("long", [1] * 95)):
        begin(drafter, world, rid, tokens)
    views = [view("a", len(FIRST)), view("b", len(SECOND) + 1), view("long", 95), view("unknown", 4)]
    assert set(ask(drafter, *views)) == {"a"}  # "long" has no five positions left
    held = drafter.cache.pool.allocate(drafter.cache.pool.available)
    drafter.commit("b", [1] * 9, features(world, drafter, [*SECOND, *[1] * 9])[len(SECOND) - 1 : -1])
    assert ask(drafter, view("b", len(SECOND) + 9)) == {}
    assert held is not None
    drafter.cache.pool.release(held)
    assert set(ask(drafter, view("b", len(SECOND) + 9))) == {"b"}  # nothing was lost


@pytest.mark.parametrize(
    "change, message",
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "no other layouts are known"),
        ({"markov_head_type": "transformer"}, "not vanilla, gated or rnn"),
        ({"block_size": 65}, "block_size"),
        ({"mask_token_id": VOCAB}, "mask_token_id 12 is not in the vocabulary"),
        ({"target_layer_ids": [0, 4]}, "the target has 4"),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}, "layer_types"),
        ({"hidden_size": 16}, "hidden_size 16, and the target has 32"),
        ({"markov_rank": 3}, r"markov_w1.weight is \[12, 6\], expected \[12, 3\]"),
        ({"enable_confidence_head": False}, "unknown tensors confidence_head.proj.bias"),
        ({"num_hidden_layers": 3}, "no tensor 'layers.2"),
        (
            {"layout": "speculators", "sample_from_anchor": False, "markov_head_type": "rnn"},
            "sample_from_anchor",
        ),
        ({"layout": "speculators", "draft_vocab_size": 8, "projector_type": "domino"}, "projector_type"),
    ],
)
def test_what_it_cannot_read_is_refused(
    world: World, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    plain = block_heads.dspark_settings(world.model, change.get("layout", "deepspec"))
    path = write(tmp_path, block_heads.dspark(world.model, plain), plain | change)
    with pytest.raises(ConfigError, match=message):
        make(world, path)


def test_another_vocabulary_is_refused(world: World, tmp_path: Path) -> None:
    other = tiny_llama(VOCAB + 1, layers=4)
    with pytest.raises(VocabularyMismatch):
        make(world, block_heads.write_dspark(tmp_path, other))
