"""Prompt lookup: what followed the last n tokens earlier in this very sequence (Saxena, 2023).

Costs no model pass and no KV. Wins where output repeats input: edits, code, summaries, extraction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.drafters.registry import Making

MOST_MATCHES = 8  # looked at for each continuation: a monotonous text has thousands, all alike


@dataclass(slots=True)
class _History:
    tokens: list[int] = field(default_factory=list)
    # n-gram -> positions right behind its occurrences, the most recent last
    followers: dict[tuple[int, ...], list[int]] = field(default_factory=lambda: defaultdict(list))


class NgramDrafter:
    """Proposes the `width` most recent distinct continuations of the longest matching n-gram."""

    vocab_size: int | None = None

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._histories: dict[str, _History] = {}

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views))

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        trees = {}
        for view in ticket.views:
            history = self._histories.get(view.rid)
            if history and len(history.tokens) == view.length:
                branches = self._branches(history, view.depth, view.width)
                if branches:
                    trees[view.rid] = merge(branches)
        return trees

    def commit(self, rid: str, tokens: Sequence[int], features: torch.Tensor | None = None) -> None:
        if history := self._histories.get(rid):
            self._extend(history, tokens)

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        history = self._histories.get(rid)
        if history is None or history.tokens != list(tokens[: len(history.tokens)]):
            history = self._histories[rid] = _History()
        self._extend(history, tokens[len(history.tokens) :])

    def release(self, rid: str) -> None:
        self._histories.pop(rid, None)

    def length(self, rid: str) -> int | None:
        history = self._histories.get(rid)
        return len(history.tokens) if history else None

    def _extend(self, history: _History, tokens: Sequence[int]) -> None:
        for token in tokens:
            # Indexed when the follower appears, so the last n-gram never matches itself.
            end = len(history.tokens)
            for n in self._sizes:
                if end >= n:
                    history.followers[tuple(history.tokens[-n:])].append(end)
            history.tokens.append(token)

    def _branches(self, history: _History, depth: int, width: int) -> list[tuple[int, ...]]:
        found: dict[tuple[int, ...], None] = {}
        for position in islice(self._matches(history), MOST_MATCHES * width):
            found[_copy(history.tokens, position, depth)] = None
            if len(found) == width:
                break
        return list(found)

    def _matches(self, history: _History) -> Iterator[int]:
        """Positions behind earlier occurrences: the longest n-gram first, then the most recent."""
        for n in self._sizes:
            yield from reversed(history.followers.get(tuple(history.tokens[-n:]), ()))


def _copy(tokens: Sequence[int], position: int, depth: int) -> tuple[int, ...]:
    """`depth` tokens from `position`; a copy that runs over the end goes on in itself (as in LZ77)."""
    period = len(tokens) - position
    return tuple(tokens[position + i % period] for i in range(depth))


def merge(branches: Sequence[Sequence[int]]) -> DraftTree:
    """Branches from the root as one tree, level by level; equal prefixes become one node."""
    nodes: dict[tuple[int, ...], int] = {}
    for level in range(max(map(len, branches))):
        for branch in branches:
            if len(branch) > level:
                nodes.setdefault(tuple(branch[: level + 1]), len(nodes))
    return DraftTree(
        tokens=tuple(path[-1] for path in nodes),
        parents=tuple(nodes[path[:-1]] if len(path) > 1 else -1 for path in nodes),
    )


def make(making: Making) -> NgramDrafter:
    return NgramDrafter(making.config.max_ngram, making.config.min_ngram)
