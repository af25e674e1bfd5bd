"""Lookahead decoding (Fu et al., arXiv 2402.02057): the target guesses ahead by itself, in parallel.

A window of W columns stands ahead of the text. The first tokens of the columns are a chain of guesses; below
each stands its trajectory, what the target said in the last rounds would follow. All are nodes of the draft,
so each verify pass is also a Jacobi step: what the target now thinks likeliest behind a trajectory becomes
its next token. One of N tokens is an n-gram for the pool; what follows the last token there is drafted, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import torch

from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.drafters.ngram import merge
from gammaray.engine.drafters.registry import Making

PROMPT_TOKENS = 4096  # of a prompt whose n-grams begin the pool, the last ones


@dataclass(frozen=True, slots=True)
class Size:
    """W, N and G of the paper."""

    window: int = 5
    ngram: int = 3
    pool: int = 5

    @property
    def levels(self) -> int:
        """Tokens of a column; the n-gram's last one is what the target says behind them."""
        return self.ngram - 1

    def columns(self, view: DraftView) -> int:
        """As many as fit the depth, and half of the nodes: the other half is for n-grams."""
        return max(0, min(self.window, view.nodes // 2 // self.levels, view.depth - self.levels + 1))


@dataclass(slots=True)
class Lookahead:
    """One sequence: its tokens, the window, and the pool of n-grams by their first token, the latest last."""

    size: Size
    tokens: list[int]
    columns: list[list[int]] = field(init=False)
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = max(self.size.ngram, len(self.tokens) - PROMPT_TOKENS)
        for end in range(first, len(self.tokens) + 1):
            self.remember(self.tokens[end - self.size.ngram : end])
        guess = Random(0).choice  # any token will do, but the same every time
        self.columns = [[guess(self.tokens)] for _ in range(self.size.window)]

    def branches(self, view: DraftView) -> list[tuple[int, ...]]:
        """N-grams, then columns: the former are likelier to be right."""
        columns = self.paths()[: self.size.columns(view)]
        nodes = {path[:end] for path in columns for end in range(1, len(path) + 1)}
        ngrams: list[tuple[int, ...]] = []
        for ngram in reversed(self.pool.get(self.tokens[-1], {})):
            path = ngram[: view.depth]
            grown = nodes | {path[:end] for end in range(1, len(path) + 1)}
            if len(grown) <= view.nodes:
                nodes = grown
                ngrams.append(path)
        return ngrams + columns

    def paths(self) -> list[tuple[int, ...]]:
        """Of each column its tokens from the root on: the chain of guesses up to it, then its trajectory."""
        chain = [column[0] for column in self.columns]
        return [(*chain[:at], *column) for at, column in enumerate(self.columns)]

    def observe(self, tree: DraftTree, likeliest: Sequence[int]) -> None:
        """The Jacobi step of each column that is in the tree, of which parts may have been left out.
        `likeliest` [1 + K]: behind the root and each node."""
        nodes = {path: node for node, path in enumerate(tree.paths)}
        for column, path in zip(self.columns, self.paths(), strict=True):
            if (end := nodes.get(path)) is not None:
                column.append(likeliest[1 + end])
                if len(column) == self.size.ngram:
                    self.remember(column)
                    del column[0]

    def extend(self, tokens: Sequence[int]) -> None:
        """The window stays as it is: a Jacobi step moves it by one token, however many were accepted."""
        for token in tokens:
            self.tokens.append(token)
            if len(self.tokens) >= self.size.ngram:
                self.remember(self.tokens[-self.size.ngram :])

    def remember(self, ngram: Sequence[int]) -> None:
        kept = self.pool.setdefault(ngram[0], {})
        following = tuple(ngram[1:])
        kept.pop(following, None)
        kept[following] = None
        if len(kept) > self.size.pool:
            del kept[next(iter(kept))]


class LookaheadDrafter:
    """One tree for both branches of the paper: the n-grams to verify, and the window that finds new ones."""

    top = 1

    def __init__(self, vocab_size: int, size: Size = Size()) -> None:
        self.vocab_size: int | None = vocab_size
        self._size = size
        self._texts: dict[str, Lookahead] = {}

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views))

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        trees = {}
        for view in ticket.views:
            text = self._texts.get(view.rid)
            if text and len(text.tokens) == view.length and (branches := text.branches(view)):
                trees[view.rid] = replace(merge(branches), whole=self._size.columns(view) > 0)
        return trees

    def observe(self, rid: str, tree: DraftTree | None, likeliest: torch.Tensor) -> None:
        if tree and (text := self._texts.get(rid)):
            text.observe(tree, likeliest[:, 0].tolist())

    def commit(self, rid: str, tokens: Sequence[int], features: torch.Tensor | None = None) -> None:
        if text := self._texts.get(rid):
            text.extend(tokens)

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        text = self._texts.get(rid)
        if text and text.tokens == list(tokens[: len(text.tokens)]):
            text.extend(tokens[len(text.tokens) :])
        else:
            self._texts[rid] = Lookahead(self._size, list(tokens))

    def release(self, rid: str) -> None:
        self._texts.pop(rid, None)

    def length(self, rid: str) -> int | None:
        text = self._texts.get(rid)
        return len(text.tokens) if text else None


def make(making: Making) -> LookaheadDrafter:
    config = making.config
    return LookaheadDrafter(making.target.vocab_size, Size(config.window, config.ngram, config.pool))
