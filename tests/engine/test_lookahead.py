"""Lookahead decoding: the window and the pool against targets whose likeliest tokens are known functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from gammaray.engine.drafters.base import DraftTree, DraftView
from gammaray.engine.drafters.lookahead import Lookahead, LookaheadDrafter, Size
from gammaray.types import SamplingParams

VOCAB = 17


def local(tokens: Sequence[int]) -> int:
    """What a target thinks likeliest that sees two tokens, so that it counts whose trajectory one reads."""
    return (5 * tokens[-2] + 3 * tokens[-1] + 1) % VOCAB


def strict(tokens: Sequence[int]) -> int:
    """... and of one whose text does not repeat itself, and is the same whatever was guessed before."""
    return len(tokens) ** 2 + 3


class Run:
    """Greedy rounds of one request; `lose` nodes of each draft, from its end, are never verified."""

    def __init__(
        self,
        size: Size,
        depth: int,
        width: int,
        lose: int = 0,
        says: Callable[[Sequence[int]], int] = local,
    ) -> None:
        self.says = says
        self.drafter = LookaheadDrafter(VOCAB, size)
        self.tokens = [1, 2]  # fewer than an n-gram, so the pool begins empty
        self.drafter.catch_up("r", self.tokens)
        self.shape, self.lose = (depth, width), lose
        self.accepted = 0

    def round(self) -> DraftTree | None:
        view = DraftView("r", len(self.tokens), *self.shape, SamplingParams(), 0)
        drafted = self.drafter.collect(self.drafter.begin([view]), 0.0).get("r")
        tree = drafted.subtree(range(max(0, len(drafted) - self.lose))) if drafted else None
        paths = tree.paths if tree else []
        rows = [[self.says([*self.tokens, *path])] for path in [(), *paths]]
        self.drafter.observe("r", tree, torch.tensor(rows))
        new = [self.says(self.tokens)]
        while tuple(new) in paths:
            new.append(self.says([*self.tokens, *new]))
        self.accepted += len(new) - 1
        self.tokens += new
        self.drafter.commit("r", new)
        return drafted

    @property
    def text(self) -> Lookahead:
        return self.drafter._texts["r"]


@given(
    size=st.builds(Size, window=st.integers(1, 6), ngram=st.integers(3, 5), pool=st.integers(1, 4)),
    depth=st.integers(1, 8),
    width=st.integers(1, 8),
    lose=st.integers(0, 3),
)
def test_all_that_the_pool_holds_is_what_the_target_said(
    size: Size, depth: int, width: int, lose: int
) -> None:
    """The row of another node, a column that goes on from another's chain, a pool or a tree without bound."""
    run = Run(size, depth, width, lose)
    for _ in range(12):
        tree = run.round()
        assert tree is None or (len(tree) <= depth * width and tree.depth <= depth)
        assert len(run.text.columns) == size.window
        for first, kept in run.text.pool.items():
            assert len(kept) <= size.pool
            for following in kept:
                gram = [first, *following]
                assert len(gram) == size.ngram
                assert all(local(gram[:end]) == gram[end] for end in range(2, size.ngram))


def test_the_window_finds_n_grams_that_the_text_never_had() -> None:
    """Else it would be prompt lookup."""
    run = Run(Size(window=5, ngram=3, pool=5), depth=6, width=6)
    for _ in range(10):
        run.round()
    text = {tuple(run.tokens[at : at + 3]) for at in range(len(run.tokens))}
    found = {(first, *following) for first, kept in run.text.pool.items() for following in kept}
    assert len(found - text) > 10


def test_what_it_finds_is_accepted_later() -> None:
    """Trajectories that do not follow the guesses before them."""
    run = Run(Size(window=5, ngram=4), depth=8, width=8, says=strict)
    for _ in range(40):
        run.round()
    assert run.accepted > 50


@given(window=st.integers(1, 8), ngram=st.integers(2, 8), depth=st.integers(1, 12), width=st.integers(1, 8))
def test_the_window_leaves_half_of_the_nodes_to_the_n_grams(
    window: int, ngram: int, depth: int, width: int
) -> None:
    size = Size(window, ngram)
    view = DraftView("r", 0, depth, width, SamplingParams(), 0)
    assert 0 <= size.columns(view) * size.levels <= view.nodes / 2


def test_where_no_column_fits_only_n_grams_are_verified() -> None:
    drafter = LookaheadDrafter(VOCAB, Size(window=5, ngram=4))
    text = [1, 2, 3, 4, 5, 1]
    drafter.catch_up("r", text)
    view = DraftView("r", len(text), 2, 1, SamplingParams(), 0)
    assert drafter.collect(drafter.begin([view]), 0.0)["r"] == DraftTree((2, 3), (-1, 0))
