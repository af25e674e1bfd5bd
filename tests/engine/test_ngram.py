"""The n-gram drafter on known sequences."""

from __future__ import annotations

from gammaray.engine.drafters.base import DraftTree, DraftView
from gammaray.engine.drafters.ngram import NgramDrafter, merge
from gammaray.types import SamplingParams


def propose(drafter: NgramDrafter, tokens: list[int], depth: int, width: int = 1) -> DraftTree | None:
    drafter.catch_up("r", tokens)
    return ask(drafter, len(tokens), depth, width)


def ask(drafter: NgramDrafter, length: int, depth: int, width: int = 1) -> DraftTree | None:
    view = DraftView("r", length, depth, width, SamplingParams(), 0)
    return drafter.collect(drafter.begin([view]), 0.0).get("r")


def test_the_continuation_of_the_longest_match_is_proposed() -> None:
    tree = propose(NgramDrafter(3, 1), [1, 2, 3, 4, 9, 3, 5, 1, 2, 3], depth=2)
    assert tree == DraftTree((4, 9), (-1, 0))  # "1 2 3" beats the later "3 5"


def test_the_most_recent_of_equal_matches_is_proposed() -> None:
    tree = propose(NgramDrafter(2, 2), [1, 2, 7, 1, 2, 8, 1, 2], depth=1)
    assert tree == DraftTree((8,), (-1,))


def test_width_takes_distinct_continuations_and_merges_their_prefixes() -> None:
    tokens = [1, 2, 7, 3, 0, 1, 2, 7, 4, 0, 1, 2, 7, 4, 0, 1, 2]
    tree = propose(NgramDrafter(2, 2), tokens, depth=2, width=2)
    assert tree == DraftTree((7, 4, 3), (-1, 0, 0))


def test_a_copy_that_runs_over_the_end_goes_on_in_itself() -> None:
    tree = propose(NgramDrafter(2, 2), [5, 6, 5, 6, 5, 6], depth=5)
    assert tree is not None
    assert tree.tokens == (5, 6, 5, 6, 5)


def test_nothing_is_proposed_without_a_match() -> None:
    assert propose(NgramDrafter(4, 2), [1, 2, 3, 4], depth=4) is None


def test_committed_tokens_are_matched_like_the_prompt() -> None:
    drafter = NgramDrafter(2, 2)
    drafter.catch_up("r", [1, 2])
    drafter.commit("r", [3, 1, 2])
    assert ask(drafter, 5, depth=1) == DraftTree((3,), (-1,))


def test_a_stale_state_proposes_nothing_until_it_caught_up() -> None:
    drafter = NgramDrafter(2, 2)
    drafter.catch_up("r", [1, 2, 3, 1, 2])
    assert ask(drafter, 6, depth=1) is None
    drafter.catch_up("r", [1, 2, 3, 1, 2, 3])
    assert ask(drafter, 6, depth=1) == DraftTree((1,), (-1,))


def test_catching_up_to_another_history_forgets_the_old_one() -> None:
    drafter = NgramDrafter(2, 2)
    drafter.catch_up("r", [1, 2, 3, 1, 2])
    assert propose(drafter, [1, 2, 4, 1, 2], depth=1) == DraftTree((4,), (-1,))


def test_release_forgets() -> None:
    drafter = NgramDrafter()
    drafter.catch_up("r", [1, 2])
    drafter.release("r")
    assert drafter.length("r") is None


def test_merging_keeps_levels_together() -> None:
    assert merge([(1, 2), (3, 4)]) == DraftTree((1, 3, 2, 4), (-1, -1, 0, 1))


def test_a_monotonous_text_does_not_make_drafting_slow() -> None:
    drafter = NgramDrafter(2, 1)
    drafter.catch_up("r", [1] * 5000)
    looked_at = 0
    matches = drafter._matches

    def counted(history: object):  # type: ignore[no-untyped-def]
        nonlocal looked_at
        for position in matches(history):  # type: ignore[arg-type]
            looked_at += 1
            yield position

    drafter._matches = counted  # type: ignore[method-assign]
    tree = ask(drafter, 5000, depth=4, width=4)
    assert tree is not None
    assert tree.tokens == (1, 1, 1, 1)
    assert looked_at <= 40
