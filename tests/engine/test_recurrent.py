"""State space models as drafters: a state per drafted token, caught up in bounded pieces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.registered import VOCAB, save, target
from tiny import tiny_llama, tiny_model
from torch import Tensor
from transformers import Mamba2Config, MambaConfig

from gammaray.config import Config, parse
from gammaray.engine.build import build_apart, build_drafter
from gammaray.engine.drafters import recurrent
from gammaray.engine.drafters.base import DraftTree, DraftView
from gammaray.engine.drafters.recurrent import RecurrentDrafter
from gammaray.engine.drafters.tree_maker import TreeMaker
from gammaray.engine.loading import load_runner, load_tokenizer
from gammaray.engine.recurrent import RecurrentRunner
from gammaray.engine.validate import validate
from gammaray.errors import ModelUnsupported, VocabularyMismatch
from gammaray.types import SamplingParams

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mamba": (MambaConfig, {}),
    "mamba2": (Mamba2Config, {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}),
}


def model(kind: str, vocab: int = VOCAB) -> Any:
    cls, shape = KINDS[kind]
    return tiny_model(cls, vocab, layers=2, seed=3, state_size=4, **shape)


class Counting(RecurrentRunner):
    """Notes how many tokens each pass was fed."""

    def __init__(self, kind: str) -> None:
        self.fed: list[int] = []
        super().__init__(model(kind))
        self.fed.clear()

    def forward(self, tokens: Sequence[Sequence[int]], states: Sequence[Tensor] | None) -> Any:
        self.fed.append(sum(map(len, tokens)))
        return super().forward(tokens, states)


def view(rid: str, length: int, depth: int = 3, width: int = 1) -> DraftView:
    return DraftView(rid, length, depth, width, SamplingParams(temperature=0.0), 0)


def ask(drafter: RecurrentDrafter, *views: DraftView) -> dict[str, DraftTree]:
    return dict(drafter.collect(drafter.begin(views), 0.0))


def check_state(drafter: RecurrentDrafter, kind: str, rid: str, tokens: list[int]) -> None:
    """Against one pass over the whole sequence, by transformers' own model."""
    found = drafter.committed(rid)
    assert found is not None and found[0] == tokens[: len(found[0])]
    _, fresh = RecurrentRunner(model(kind)).forward([found[0]], None)
    torch.testing.assert_close(found[1], fresh[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_drafts_what_the_model_says_behind_each_path(kind: str) -> None:
    """A node that went on from its elder sibling's state would be the bug."""
    runner = RecurrentRunner(model(kind))
    drafter = RecurrentDrafter(runner, TreeMaker())
    drafter.catch_up("r", TOKENS)
    tree = ask(drafter, view("r", len(TOKENS), depth=3, width=3))["r"]
    growth = drafter._states["r"].growth
    assert growth is not None and growth.fed == 6 and len(tree) == 9
    for node in range(growth.fed):
        path, at = [], node
        while at >= 0:
            path, at = [tree.tokens[at], *path], tree.parents[at]
        with torch.no_grad():
            expected = model(kind)(input_ids=torch.tensor([TOKENS + path]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(growth.rows[node], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_a_commit_takes_the_state_of_the_accepted_length(kind: str, accepted: int) -> None:
    drafter = RecurrentDrafter(runner := Counting(kind), TreeMaker())
    drafter.catch_up("r", TOKENS)
    tree = ask(drafter, view("r", len(TOKENS)))["r"]
    wrong = next(token for token in range(VOCAB) if token not in tree.tokens)
    committed = [*tree.tokens[:accepted], wrong]
    drafter.commit("r", committed)
    kept = min(accepted, 2)  # the last level has no state
    assert drafter.committed("r") is not None
    assert len(drafter.committed("r")[0]) == len(TOKENS) + kept  # type: ignore[index]
    check_state(drafter, kind, "r", TOKENS + committed)
    runner.fed.clear()
    assert ask(drafter, view("r", len(TOKENS) + len(committed), depth=1))
    assert sum(runner.fed) == len(committed) - kept  # nothing is fed twice
    check_state(drafter, kind, "r", TOKENS + committed)


@pytest.mark.parametrize(
    ("kind", "passes"),
    [("mamba", [[8, 1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1]]), ("mamba2", [[8, 1, 1, 1], [8]])],
)
def test_a_long_catch_up_takes_rounds_of_bounded_size(
    kind: str, passes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mamba's scan begins at zero, so from a state on it takes one token at a time; Mamba 2's does not."""
    monkeypatch.setattr(recurrent, "CATCH_UP_TOKENS", 8)
    monkeypatch.setattr(recurrent, "CATCH_UP_STEPS", 3)
    drafter = RecurrentDrafter(runner := Counting(kind), TreeMaker())
    tokens = (TOKENS * 3)[:19]
    drafter.catch_up("r", tokens)
    for number, expected in enumerate(passes, start=1):
        runner.fed.clear()
        assert bool(ask(drafter, view("r", 19, depth=1))) == (number == len(passes))
        assert runner.fed == expected
    check_state(drafter, kind, "r", tokens)


def test_long_prompts_share_what_a_round_may_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "CATCH_UP_TOKENS", 8)
    monkeypatch.setattr(recurrent, "CATCH_UP_STEPS", 1)
    drafter = RecurrentDrafter(runner := Counting("mamba"), TreeMaker())
    drafter.catch_up("long", [*TOKENS, 0])
    drafter.catch_up("next", TOKENS[:6])
    views = view("long", 9, depth=1), view("next", 6, depth=1)
    assert set(ask(drafter, *views)) == {"long"}
    assert runner.fed == [8, 1]
    assert set(ask(drafter, *views)) == {"long", "next"}


def test_sequences_share_passes_and_get_what_they_would_alone() -> None:
    prompts = {"a": TOKENS, "b": TOKENS[3:], "c": TOKENS[:1]}
    runner = Counting("mamba")
    drafter = RecurrentDrafter(runner, TreeMaker())
    for rid, tokens in prompts.items():
        drafter.catch_up(rid, tokens)
    together = ask(drafter, *(view(rid, len(tokens), width=2) for rid, tokens in prompts.items()))
    assert runner.fed == [8, 5, 1, 6, 6]  # prompts alone, then levels together
    for rid, tokens in prompts.items():
        alone = RecurrentDrafter(Counting("mamba"), TreeMaker())
        alone.catch_up(rid, tokens)
        assert ask(alone, view(rid, len(tokens), width=2))[rid].tokens == together[rid].tokens
        drafter.release(rid)
        assert drafter.length(rid) is None and drafter.committed(rid) is None


def test_a_state_does_not_keep_the_batch_that_it_comes_from() -> None:
    """A row of a pass over all sequences is a view of all their states."""
    drafter = RecurrentDrafter(RecurrentRunner(model("mamba")), TreeMaker())
    for rid in "ab":
        drafter.catch_up(rid, TOKENS)
    trees = ask(drafter, view("a", 8), view("b", 8))
    drafter.commit("a", trees["a"].tokens)
    kept = drafter.committed("a")
    assert kept is not None
    assert kept[1].untyped_storage().nbytes() == drafter.runner.state_bytes


def test_what_keeps_keys_and_values_is_refused() -> None:
    with pytest.raises(ModelUnsupported, match="cannot draft from states that are kept"):
        RecurrentRunner(tiny_llama(VOCAB))


# Behind `method: model` ---------------------------------------------------------------------------------


def config(folder: Path, vocab: int = VOCAB, dtype: str = "float32") -> Config:
    small = save(folder / "small", model("mamba2", vocab))
    return parse(
        {
            "target": {
                "model": save(folder / "target", target()),
                "dtype": "float32",
                "kv": {"num_blocks": 32},
            },
            "drafters": {"small": {"method": "model", "model": small, "dtype": dtype}},
            "tenants": {"default": {"drafter": "small"}},
        },
        "test",
    )


def test_a_recurrent_checkpoint_is_a_model_like_any_other(tmp_path: Path) -> None:
    settings = config(tmp_path, dtype="bfloat16")
    runner = load_runner(settings.target.model, "float32", num_blocks=32)
    inside = build_drafter("small", settings, runner, load_tokenizer(settings.target.model))
    for built in (inside, build_apart(settings, "small")):
        assert isinstance(built, RecurrentDrafter)
        assert built.runner.dtype == torch.bfloat16 and built.vocab_size == VOCAB
    details = {check.name: (check.ok, check.detail) for check in validate(settings, determinism=True)}
    assert details["drafter small"][1].startswith("recurrent model of 2 layers, same vocabulary of 12 tokens")
    assert all(ok for ok, _ in details.values()) and "on/off small" in details


def test_its_vocabulary_is_checked_as_that_of_any_model(tmp_path: Path) -> None:
    with pytest.raises(VocabularyMismatch):
        build_apart(config(tmp_path, vocab=VOCAB + 1), "small")
