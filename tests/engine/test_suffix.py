"""The suffix drafter: its automaton against a naive search, what it proposes, and what it may remember."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.engine.drafters import suffix
from gammaray.engine.drafters.automaton import NOWHERE, ROOT, Automaton
from gammaray.engine.drafters.base import DraftTree, DraftView
from gammaray.engine.drafters.suffix import SuffixDrafter
from gammaray.types import SamplingParams

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=24)


def ask(drafter: SuffixDrafter, rid: str, length: int, depth: int, width: int = 1) -> DraftTree | None:
    view = DraftView(rid, length, depth, width, SamplingParams(), 0)
    return drafter.collect(drafter.begin([view]), 0.0).get(rid)


def propose(drafter: SuffixDrafter, tokens: list[int], depth: int, width: int = 1) -> DraftTree | None:
    drafter.catch_up("r", tokens)
    return ask(drafter, "r", len(tokens), depth, width)


def answer(drafter: SuffixDrafter, rid: str, prompt: list[int], tokens: Sequence[int], salt: bytes) -> None:
    """A request from its first draft to its end."""
    drafter.catch_up(rid, prompt, salt)
    for at, token in enumerate(tokens):
        ask(drafter, rid, len(prompt) + at, depth=2)
        drafter.commit(rid, [token])
    ask(drafter, rid, len(prompt) + len(tokens), depth=2)
    drafter.release(rid)


def ends(texts: Sequence[Sequence[int]], part: Sequence[int]) -> int:
    """Places in the texts where `part` ends."""
    size = len(part)
    return sum(list(part) == list(text[at : at + size]) for text in texts for at in range(len(text)))


@given(texts=st.lists(TEXTS, min_size=1, max_size=3), turns=st.randoms(use_true_random=False))
def test_the_automaton_knows_every_substring_and_how_often_it_was(
    texts: list[list[int]], turns: object
) -> None:
    """Texts that are read in turns, as a tenant's requests are: a split that forgets another's place, a count
    that a clone does not inherit."""
    automaton = Automaton()
    left = [list(text) for text in texts]
    last = [ROOT] * len(texts)
    while any(left):
        turn = turns.choice([at for at, rest in enumerate(left) if rest])  # type: ignore[attr-defined]
        last[turn] = automaton.read(last[turn], left[turn].pop(0))
    substrings = {tuple(t[a:b]) for t in texts for a in range(len(t)) for b in range(a + 1, len(t) + 1)}
    for known in substrings:
        state, length = automaton.match(known)
        assert (length, automaton.count[state]) == (len(known), ends(texts, known))
        for token in range(3):
            there = (*known, token) in substrings
            assert (automaton.step(state, token) != NOWHERE) == there
    assert len(automaton) <= max(2, 2 * sum(map(len, texts)))


def test_a_token_takes_amortised_constant_time() -> None:
    """Also in texts with as many contexts as tokens."""

    class Counting(Automaton):
        steps = 0

        def step(self, state: int, token: int) -> int:
            self.steps += 1
            return super().step(state, token)

    for text in ([0] * 3000, [0, 1] * 1500, [at.bit_count() % 2 for at in range(3000)]):
        automaton, last = Counting(), ROOT
        for token in text:
            last = automaton.read(last, token)
        assert automaton.steps < 6 * len(text)


@given(text=TEXTS)
def test_what_followed_the_longest_earlier_suffix_is_proposed_by_how_often_it_did(text: list[int]) -> None:
    """Against a naive search."""
    tree = propose(SuffixDrafter(), text, depth=1, width=3)
    sizes = [size for size in range(1, len(text)) if ends([text[:-1]], text[-size:])]
    if not sizes:
        assert tree is None
        return
    context = text[-max(sizes) :]
    followed = [b for a, b in enumerate(text) if a >= len(context) and text[a - len(context) : a] == context]
    last = {token: at for at, token in enumerate(text) if text[max(0, at - len(context)) : at] == context}
    expected = sorted(set(followed), key=lambda token: (-followed.count(token), -last[token]))
    assert tree is not None and tree.tokens == tuple(expected)
    assert tree.confidence == pytest.approx([followed.count(t) / ends([text], context) for t in expected])


@given(text=TEXTS, depth=st.integers(1, 5), width=st.integers(1, 3))
def test_a_tree_keeps_to_its_budget_and_begins_with_what_is_likeliest(
    text: list[int], depth: int, width: int
) -> None:
    tree = propose(SuffixDrafter(), text, depth, width)
    if tree:
        assert len(tree) <= depth * width and tree.depth <= depth
        assert len(set(tree.paths)) == len(tree)
        assert max(tree.parents.count(parent) for parent in tree.parents) <= width
        assert tree.confidence is not None and all(0 < share <= 1 for share in tree.confidence)


def test_a_period_goes_on_over_the_end_of_the_text() -> None:
    tree = propose(SuffixDrafter(), [5, 6, 7, 5, 6, 7, 5], depth=6)
    assert tree is not None and tree.tokens == (6, 7, 5, 6, 7, 5)


def test_a_match_that_is_too_short_proposes_nothing() -> None:
    text = [1, 2, 3, 9, 2, 3]
    assert propose(SuffixDrafter(min_match=3), text, depth=2) is None
    assert propose(SuffixDrafter(min_match=2), text, depth=2) is not None


def test_answers_serve_later_requests_of_their_tenant_and_of_no_other() -> None:
    """One memory for all salts, or none for the empty one."""
    for salt, others in ((b"a", (b"b", b"")), (b"", (b"a",))):
        drafter = SuffixDrafter(memory=1024)
        answer(drafter, "first", [1, 2], [7, 8, 9], salt)
        for other in others:
            drafter.catch_up("other", [3, 7], other)
            assert ask(drafter, "other", 2, depth=2) is None
        drafter.catch_up("own", [3, 7], salt)
        tree = ask(drafter, "own", 2, depth=2)
        assert tree is not None and tree.tokens == (8, 9)


def test_prompts_are_not_remembered_and_nothing_is_without_leave() -> None:
    drafter = SuffixDrafter(memory=1024)
    answer(drafter, "first", [1, 2, 3, 4], [7, 8], b"a")
    drafter.catch_up("own", [5, 1, 2], b"a")
    assert ask(drafter, "own", 3, depth=2) is None
    forgetful = SuffixDrafter()
    answer(forgetful, "first", [1, 2], [7, 8, 9], b"a")
    forgetful.catch_up("own", [3, 7], b"a")
    assert ask(forgetful, "own", 2, depth=2) is None


def test_what_a_preempted_answer_already_had_is_not_remembered_twice() -> None:
    drafter = SuffixDrafter(memory=1024)
    answer(drafter, "r", [1, 2], [7, 8, 9], b"a")
    answer(drafter, "r", [1, 2, 7, 8, 9], [5], b"a")
    (automaton,) = drafter._memories[b"a"].automata
    state, _ = automaton.match([8])
    assert automaton.count[state] == 1


def test_a_memory_stays_within_its_bound_and_forgets_the_oldest() -> None:
    drafter = SuffixDrafter(memory=40)
    for at in range(30):
        answer(drafter, "r", [0], range(100 * at, 100 * at + 7), b"a")
        memory = drafter._memories[b"a"]
        assert sum(automaton.size for automaton in memory.automata) <= 40
    known = [a for a in range(30) if any(m.match([100 * a])[1] for m in memory.automata)]
    assert known == list(range(known[0], 30)) and len(known) >= 2


def test_a_long_prompt_is_read_over_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "READ_TOKENS", 4)
    drafter = SuffixDrafter()
    text = [1, 2, 3] * 3
    drafter.catch_up("r", text)
    assert [ask(drafter, "r", 9, depth=1) is not None for _ in range(3)] == [False, False, True]


def test_a_stale_or_released_state_proposes_nothing() -> None:
    drafter = SuffixDrafter()
    drafter.catch_up("r", [1, 2, 1])
    assert ask(drafter, "r", 4, depth=1) is None
    drafter.catch_up("r", [1, 2, 1, 2])
    assert ask(drafter, "r", 4, depth=1) is not None
    drafter.release("r")
    assert ask(drafter, "r", 4, depth=1) is None and drafter.length("r") is None
