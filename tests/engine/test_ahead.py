"""Drafting ahead: a look-up gives the very draft that drafting afterwards would give, and nothing is lost.

The draft models are tapes (support/tape.py): one wrong KV slot changes what they propose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ahead import AheadDrafter
from support.joint import p_value
from support.tape import TapeRunner

from gammaray.engine.drafters.base import DraftTree, DraftView
from gammaray.engine.drafters.growth import Growth
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.drafters.outcomes import Outcomes, share_budget
from gammaray.types import SamplingParams

VOCAB = 6
GREEDY = SamplingParams(temperature=0.0)
CHAIN = (-1, 0, 1, 2)


def tape(noise: float = 0.0, blocks: int = 64) -> TapeRunner:
    return TapeRunner(VOCAB, blocks=blocks, block_size=4, max_model_len=64, noise=noise)


def ask(drafter: ModelDrafter, *views: DraftView) -> dict[str, DraftTree]:
    return dict(drafter.collect(drafter.begin(views), 0.0))


def parts(tree: DraftTree | None) -> object:
    if tree is None:
        return None
    q = None if tree.q_ids is None or tree.q_probs is None else (tree.q_ids.tolist(), tree.q_probs.tolist())
    return tree.tokens, tree.parents, tree.drawn, q


@st.composite
def rounds(draw: st.DrawFn) -> list[tuple[int, int, bool, int]]:
    """(levels accepted, the token behind them, whether the draft is lost, depth) of each round."""
    one = st.tuples(st.integers(0, 6), st.integers(0, VOCAB - 1), st.booleans(), st.integers(1, 5))
    return draw(st.lists(one, min_size=1, max_size=8))


@settings(max_examples=150)
@given(
    script=rounds(),
    width=st.integers(1, 3),
    temperature=st.sampled_from([0.0, 0.9]),
    sampled=st.booleans(),
    passes=st.lists(st.integers(0, 8), min_size=1, max_size=4).map(tuple),
    likely=st.booleans(),
)
def test_a_look_up_gives_the_draft_that_would_have_been_made(
    script: list[tuple[int, int, bool, int]],
    width: int,
    temperature: float,
    sampled: bool,
    passes: tuple[int, ...],
    likely: bool,
) -> None:
    """Two sequences in lock step, one drafter that drafts ahead and one that does not."""
    ahead, behind = AheadDrafter(tape(), sampled, passes), ModelDrafter(tape(), sampled)
    target = tape(noise=0.3)
    tokens = {"a": [1, 2, 3], "b": [4, 0, 1, 1, 2]}
    sampling = SamplingParams(temperature=temperature, seed=7)
    for rid in tokens:
        ahead.catch_up(rid, tokens[rid])
        behind.catch_up(rid, tokens[rid])
    for levels, other, lost, depth in script:
        views = [DraftView(rid, len(tokens[rid]), depth, width, sampling, 0) for rid in tokens]
        found, expected = ask(ahead, *views), ask(behind, *views)
        assert {rid: parts(tree) for rid, tree in found.items()} == {
            rid: parts(tree) for rid, tree in expected.items()
        }
        for rid in tokens:
            path = [] if lost else first_path(found[rid], levels)
            bonus = target._logits((*tokens[rid], *path)).argmax() if likely else other
            emitted = [*path, int(bonus)]
            tokens[rid] += emitted
            ahead.commit(rid, emitted)
            behind.commit(rid, emitted)
            assert ahead.committed(rid)[0] == tokens[rid][: len(ahead.committed(rid)[0])]  # type: ignore[index]
        if max(map(len, tokens.values())) > 40:
            break
    assert ahead.cache.pool.audit(state.table for state in ahead._states.values()) is None


def first_path(tree: DraftTree, levels: int) -> list[int]:
    """The tokens along first children."""
    path, node = [], -1
    while len(path) < levels and node in tree.parents:
        node = tree.parents.index(node)
        path.append(tree.tokens[node])
    return path


def test_a_hit_costs_no_pass_and_a_miss_as_many_as_without() -> None:
    drafter, target = ModelDrafter(tape()), tape()
    tokens = [1, 2, 3]
    drafter.catch_up("a", tokens)
    tree = ask(drafter, DraftView("a", 3, 3, 1, GREEDY, 0))["a"]
    assert (
        sum(1 for _ in drafter.anticipate()) == 4
    )  # the path's last node, then the next draft's three levels
    before = drafter.runner.forwards  # type: ignore[attr-defined]
    follows = [*tree.tokens, int(target._logits((*tokens, *tree.tokens)).argmax())]
    drafter.commit("a", follows)
    assert len(ask(drafter, DraftView("a", 7, 3, 1, GREEDY, 0))["a"]) == 3
    assert drafter.runner.forwards == before  # type: ignore[attr-defined]
    assert drafter.hits == {"a"}
    drafter.commit("a", [int(drafter._states["a"].growth.root.argmin())])  # type: ignore[union-attr]
    ask(drafter, DraftView("a", 8, 3, 1, GREEDY, 0))
    assert drafter.runner.forwards == before + 3  # type: ignore[attr-defined]
    assert not drafter.hits


def test_drafting_ahead_takes_no_room_from_anybody() -> None:
    drafter = ModelDrafter(tape(blocks=4))
    drafter.catch_up("idle", [1] * 5)
    assert ask(drafter, DraftView("idle", 5, 2, 1, GREEDY, 0))
    drafter.catch_up("a", [2] * 5)
    assert ask(drafter, DraftView("a", 5, 2, 1, GREEDY, 0))
    list(drafter.anticipate())
    assert drafter.length("idle") == 5
    assert drafter.cache.pool.used <= 4


@pytest.mark.parametrize("gamma, width", [(3, 1), (2, 3)], ids=["chain", "tree"])
def test_sampled_drafts_made_ahead_keep_the_joint_distribution(gamma: int, width: int) -> None:
    assert p_value(AheadDrafter, gamma, width) > 1e-3


class Nearest(AheadDrafter):
    """On a miss takes what was drafted behind another token: the planted error."""

    def _outcome(self, state: object, tokens: Sequence[int]) -> tuple[list[int], int, Growth | None]:
        kept, path, ahead = super()._outcome(state, tokens)  # type: ignore[arg-type]
        growth = state.growth  # type: ignore[attr-defined]
        if ahead is None and growth and len(kept) == len(tokens) - 1:
            others = [
                n for n in growth.children(kept[-1] if kept else -1) if n < growth.fed and growth.below(n)
            ]
            if others:
                below = growth.below(others[-1])
                wrong = growth.rerooted(others[-1], below)
                return [*kept, others[-1], *below[: wrong.fed]], path + 1, wrong
        return kept, path, ahead


def test_a_draft_made_for_another_outcome_is_found_out() -> None:
    ahead, behind = Nearest(tape(), passes=(0,)), ModelDrafter(tape())
    for drafter in (ahead, behind):
        drafter.catch_up("a", [1, 2, 3])
    view = DraftView("a", 3, 3, 1, GREEDY, 0)
    first = ask(ahead, view)["a"]
    assert parts(first) == parts(ask(behind, view)["a"])
    unlikely = int(ahead._states["a"].growth.root.argmin())  # type: ignore[union-attr]
    for drafter in (ahead, behind):
        drafter.commit("a", [unlikely])
    later = replace(view, length=4)
    assert parts(ask(ahead, later)["a"]) != parts(ask(behind, later)["a"])


def test_likelier_outcomes_come_first_and_fewer_where_survival_breaks() -> None:
    outcomes = Outcomes()
    for _ in range(200):  # three of four levels accepted, then the second guess
        outcomes.learn(CHAIN, [0, 1, 2], 9, {2: [8, 9]})
    chosen = outcomes.choose(CHAIN, 6)
    assert chosen[0] == (2, 1)
    assert len(chosen) == 6 == len(set(chosen))
    stops = outcomes.stops(CHAIN)
    assert sum(stops.values()) == pytest.approx(1.0)
    assert list(stops)[:2] == [-1, 0]


def test_an_unknown_drafter_gets_more_outcomes_at_the_end_of_its_path() -> None:
    chosen = Outcomes().choose(CHAIN, 8)
    assert {node for node, _ in chosen} >= {-1, 0, 1, 3}
    assert sorted(rank for node, rank in chosen if node == -1) == list(range(sum(n == -1 for n, _ in chosen)))


@given(st.integers(1, 64), st.integers(1, 200), st.integers(0, 64), st.integers(1, 64))
def test_the_budget_fits_the_pass_and_the_tree(rows: int, sequences: int, draft: int, following: int) -> None:
    each = share_budget(rows, sequences, draft, following, 64)
    assert each * sequences <= rows
    assert draft + each * (1 + following) <= 64 or each == 0


def test_an_interrupted_draft_ahead_is_still_of_use() -> None:
    drafter, target = ModelDrafter(tape()), tape()
    drafter.catch_up("a", [1, 2, 3])
    tree = ask(drafter, DraftView("a", 3, 3, 1, GREEDY, 0))["a"]
    list(islice(drafter.anticipate(), 3))  # the next draft's first two levels stand, one pass is missing
    before = drafter.runner.forwards  # type: ignore[attr-defined]
    drafter.commit("a", [*tree.tokens, int(target._logits((1, 2, 3, *tree.tokens)).argmax())])
    assert len(ask(drafter, DraftView("a", 7, 3, 1, GREEDY, 0))["a"]) == 3
    assert drafter.runner.forwards == before + 1  # type: ignore[attr-defined]
