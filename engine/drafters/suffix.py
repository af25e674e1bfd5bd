"""SuffixDecoding (Oliaro et al., arXiv 2411.04975): what followed the longest suffix that was there before,
in this very sequence or in earlier answers to the same tenant, as a tree by how often it did.

Costs no model pass and no KV. Wins where answers repeat: agents, code, extraction, retries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nlargest
from itertools import count

import torch

from gammaray.engine.drafters.automaton import ROOT, Automaton
from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.drafters.registry import Making

READ_TOKENS = 2048  # read in a round, by all sequences together: about 10 ms
RECENT = 16  # tokens that are looked for in other answers: a longer match would hardly say more


@dataclass(slots=True)
class _Place:
    """Where one answer is in the newest automaton of a memory."""

    automaton: Automaton | None = None
    last: int = ROOT


class _Memory:
    """The answers of one tenant, in at most two automata, the newest first: as soon as it has half of the
    tokens that may be kept, a new one begins and the oldest goes."""

    def __init__(self, tokens: int) -> None:
        self._half = tokens // 2
        self.automata = [Automaton()]

    def read(self, place: _Place, token: int) -> None:
        newest = self.automata[0]
        if newest.size >= self._half:
            self.automata = [Automaton(), newest]
            newest = self.automata[0]
        if place.automaton is not newest:
            place.automaton, place.last = newest, ROOT
        place.last = newest.read(place.last, token)


@dataclass(slots=True)
class _Text:
    tokens: list[int]
    prompt: int  # leading tokens that no answer of this sequence is known to have
    memory: _Memory | None
    own: Automaton = field(default_factory=Automaton)
    last: int = ROOT
    place: _Place = field(default_factory=_Place)

    def read(self, most: int) -> int:
        """Catches up with its tokens; returns how many it read."""
        new = range(self.own.size, min(len(self.tokens), self.own.size + most))
        for position in new:
            token = self.tokens[position]
            self.last = self.own.read(self.last, token)
            if self.memory is not None and position >= self.prompt:
                self.memory.read(self.place, token)
        return len(new)

    def context(self) -> tuple[Automaton, int, int]:
        """The longest suffix that was there before: its automaton, its state there, its length."""
        found = [(self.own, *self.own.continued(self.last, len(self.tokens)))]
        for automaton in self.memory.automata if self.memory else ():
            found.append((automaton, *automaton.continued(*automaton.match(self.tokens[-RECENT:]))))
        return max(found, key=lambda one: one[2])


class SuffixDrafter:
    """Proposes the likeliest continuations of the longest suffix that was there before."""

    vocab_size: int | None = None

    def __init__(self, min_match: int = 1, memory: int = 0) -> None:
        """`memory`: tokens of answers that are kept for each tenant; 0: a sequence knows only itself."""
        self._min_match = min_match
        self._memory = memory
        self._texts: dict[str, _Text] = {}
        self._memories: dict[bytes, _Memory] = {}  # by salt: what one tenant was told is no other's to see

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views))

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        """A long prompt is read over several rounds, without a draft."""
        trees, room = {}, READ_TOKENS
        for view in ticket.views:
            text = self._texts.get(view.rid)
            if text is None or len(text.tokens) != view.length:
                continue
            room -= text.read(room)
            if text.own.size == view.length and (tree := grow(*text.context(), view, self._min_match)):
                trees[view.rid] = tree
        return trees

    def commit(self, rid: str, tokens: Sequence[int], features: torch.Tensor | None = None) -> None:
        if text := self._texts.get(rid):
            text.tokens.extend(tokens)

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        text = self._texts.get(rid)
        if text and text.tokens == list(tokens[: len(text.tokens)]):
            text.tokens.extend(tokens[len(text.tokens) :])
            return
        memory = self._memories.setdefault(salt, _Memory(self._memory)) if self._memory else None
        self._texts[rid] = _Text(list(tokens), len(tokens), memory)

    def release(self, rid: str) -> None:
        self._texts.pop(rid, None)

    def length(self, rid: str) -> int | None:
        text = self._texts.get(rid)
        return len(text.tokens) if text else None


def grow(automaton: Automaton, state: int, length: int, view: DraftView, min_match: int) -> DraftTree | None:
    """The likeliest `view.nodes` continuations, at most `width` of each node, and of equal ones the latest.

    The confidence of a node is the share of its parent's occurrences that went on with it. One that never
    went on, as at the end of a text, goes on like its longest suffix that did; so a period repeats itself.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    order = count()
    # (-cumulative confidence, order, confidence, token, parent, level, state behind it)
    heap: list[tuple[float, int, float, int, int, int, int]] = []

    def offer(state: int, length: int, score: float, parent: int, level: int) -> None:
        state, length = automaton.continued(state, length)
        if length < min_match or level > view.depth:
            return
        total = automaton.count[state]
        ways = nlargest(
            view.width,
            automaton.successors(state),
            key=lambda way: (automaton.count[way[1]], automaton.seen[way[1]]),
        )
        for token, behind in ways:
            share = min(1.0, automaton.count[behind] / total)
            heappush(heap, (-score * share, next(order), share, token, parent, level, behind))

    offer(state, length, 1.0, -1, 1)
    while heap and len(tokens) < view.nodes:
        score, _, share, token, parent, level, behind = heappop(heap)
        tokens.append(token)
        parents.append(parent)
        confidence.append(share)
        offer(behind, automaton.length[behind], -score, len(tokens) - 1, level + 1)
    if not tokens:
        return None
    return DraftTree(tuple(tokens), tuple(parents), confidence=tuple(confidence))


def make(making: Making) -> SuffixDrafter:
    config = making.config
    return SuffixDrafter(config.min_match, config.max_tokens if config.memory == "tenant" else 0)
