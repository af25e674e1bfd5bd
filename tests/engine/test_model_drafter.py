"""The model drafter's own state: catch-up within a budget, room, and what it never drafts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.tape import TapeRunner

from gammaray.engine.batch import Row
from gammaray.engine.drafters import model
from gammaray.engine.drafters.base import DraftTree, DraftView
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Counting(TapeRunner):
    """Notes how many committed tokens each pass was fed."""

    def __init__(self, **shape: int) -> None:
        super().__init__(**shape)  # type: ignore[arg-type]
        self.fed: list[int] = []

    def forward(self, rows: Sequence[Row]):  # type: ignore[no-untyped-def]
        self.fed.append(sum(len(row.pending) for row in rows))
        return super().forward(rows)


def ask(drafter: ModelDrafter, *views: DraftView) -> dict[str, DraftTree]:
    return dict(drafter.collect(drafter.begin(views), 0.0))


def view(rid: str, length: int, depth: int = 3, width: int = 1) -> DraftView:
    return DraftView(rid, length, depth, width, GREEDY, 0)


def test_a_long_catch_up_takes_rounds_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "CATCH_UP_TOKENS", 8)
    runner = Counting()
    drafter = ModelDrafter(runner)
    drafter.catch_up("long", [1, 2, 3] * 7)
    drafter.catch_up("short", [1, 2])
    wanted = view("long", 21), view("short", 2)
    rounds = [set(ask(drafter, *wanted)) for _ in range(3)]
    assert rounds == [set(), set(), {"long", "short"}]
    assert max(runner.fed) == 8


def test_sequences_that_do_not_draft_make_room() -> None:
    drafter = ModelDrafter(TapeRunner(blocks=4, block_size=4))
    drafter.catch_up("idle", [1] * 9)
    assert ask(drafter, view("idle", 9))
    drafter.catch_up("next", [2] * 9)
    assert ask(drafter, view("next", 9))
    assert drafter.length("idle") is None
    assert drafter.cache.pool.used <= 4


def test_without_room_there_is_no_draft() -> None:
    drafter = ModelDrafter(TapeRunner(blocks=4, block_size=4))
    for rid in "ab":
        drafter.catch_up(rid, [1] * 9)
    assert set(ask(drafter, view("a", 9), view("b", 9))) == {"a"}


@pytest.mark.parametrize("length, drafts", [(12, True), (13, False)])
def test_it_drafts_up_to_its_own_length_and_not_beyond(length: int, drafts: bool) -> None:
    drafter = ModelDrafter(TapeRunner(max_model_len=15))
    drafter.catch_up("r", [1] * length)
    assert bool(ask(drafter, view("r", length))) == drafts


def test_a_draft_that_was_never_committed_can_be_asked_for_again() -> None:
    drafter = ModelDrafter(TapeRunner())
    drafter.catch_up("r", [1, 2, 3])
    first = ask(drafter, view("r", 3))
    assert first
    assert ask(drafter, view("r", 3)) == first


def test_a_stale_state_drafts_nothing() -> None:
    drafter = ModelDrafter(TapeRunner())
    drafter.catch_up("r", [1, 2, 3])
    assert ask(drafter, view("r", 4)) == {}


def test_a_pass_that_fails_has_computed_nothing() -> None:
    """Else wrong KV would be taken as right, and shared through the prefix cache."""
    runner = TapeRunner()
    drafter = ModelDrafter(runner)
    drafter.catch_up("r", [1, 2, 3, 4, 5, 6])
    forward = runner.forward

    def fail(rows: Sequence[Row]):  # type: ignore[no-untyped-def]
        raise RuntimeError("no")

    runner.forward = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no"):
        ask(drafter, view("r", 6))
    runner.forward = forward  # type: ignore[method-assign]
    drafter.commit("r", [7])
    assert drafter.committed("r") == ([], [])
