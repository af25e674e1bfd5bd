"""A suffix automaton that grows token by token: every substring that was read, and how often it was."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

ROOT, NOWHERE = 0, -1
COUNTED = 32  # contexts of a token that are counted, the longest first


class Automaton:
    """The minimal automaton of all substrings of what was read (Blumer et al., 1985), built online.

    A state stands for the substrings that end at the same places: `length` is that of the longest of them,
    `count` is how many places, `seen` the last of them. `link` leads to the longest suffix that also ends
    elsewhere. Several texts may be read in turns, each from its own last state; a token takes amortised O(1).

    A text has more than COUNTED contexts only where it repeats itself without end; those that are shorter
    are then counted too rarely.
    """

    def __init__(self) -> None:
        self.size = 0  # tokens that were read
        self.length = array("i", [0])
        self.link = array("i", [NOWHERE])
        self.count = array("i", [0])
        self.seen = array("i", [0])
        # Most states have one successor, so only further ones take a dict: about 100 bytes a token in all.
        self._token = array("i", [NOWHERE])
        self._target = array("i", [NOWHERE])
        self._more: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        """States, at most 2 for each token."""
        return len(self.length)

    def read(self, last: int, token: int) -> int:
        """The state of a whole text after one more token; `last` is that before, or ROOT."""
        self.size += 1
        found = self.step(last, token)
        if found != NOWHERE:
            new = self._split(last, token, found)
        else:
            new = self._add(self.length[last] + 1)
            while last != NOWHERE and (found := self.step(last, token)) == NOWHERE:
                self._connect(last, token, new)
                last = self.link[last]
            self.link[new] = ROOT if last == NOWHERE else self._split(last, token, found)
        self._tally(new)
        return new

    def step(self, state: int, token: int) -> int:
        """The state behind `token`, or NOWHERE."""
        if self._token[state] == token:
            return self._target[state]
        more = self._more.get(state)
        return NOWHERE if more is None else more.get(token, NOWHERE)

    def successors(self, state: int) -> Iterator[tuple[int, int]]:
        """Tokens and the states behind them, in the order in which they were first seen."""
        if self._target[state] != NOWHERE:
            yield self._token[state], self._target[state]
            yield from self._more.get(state, {}).items()

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The longest suffix of `tokens` that was read: its state and its length."""
        state, length = ROOT, 0
        for token in tokens:
            while (found := self.step(state, token)) == NOWHERE and state != ROOT:
                state = self.link[state]
                length = self.length[state]
            if found != NOWHERE:
                state, length = found, length + 1
        return state, length

    def continued(self, state: int, length: int) -> tuple[int, int]:
        """The longest suffix of these `length` tokens in `state` behind which something was read."""
        while self._target[state] == NOWHERE and state != ROOT:
            state = self.link[state]
            length = self.length[state]
        return state, length

    def _add(self, length: int) -> int:
        for column, value in (
            (self.length, length),
            (self.link, NOWHERE),
            (self.count, 0),
            (self.seen, 0),
            (self._token, NOWHERE),
            (self._target, NOWHERE),
        ):
            column.append(value)
        return len(self.length) - 1

    def _connect(self, state: int, token: int, target: int) -> None:
        if self._target[state] == NOWHERE or self._token[state] == token:
            self._token[state], self._target[state] = token, target
        else:
            self._more.setdefault(state, {})[token] = target

    def _split(self, state: int, token: int, found: int) -> int:
        """The state of the longest of `state` with `token` behind it, taken out of `found` if that has longer
        ones, too."""
        length = self.length[state] + 1
        if self.length[found] == length:
            return found
        new = self._add(length)
        self._token[new], self._target[new] = self._token[found], self._target[found]
        if found in self._more:
            self._more[new] = dict(self._more[found])
        self.count[new], self.seen[new] = self.count[found], self.seen[found]
        self.link[new] = self.link[found]
        self.link[found] = new
        while state != NOWHERE and self.step(state, token) == found:
            self._connect(state, token, new)
            state = self.link[state]
        return new

    def _tally(self, state: int) -> None:
        for _ in range(COUNTED):
            if state == ROOT:
                break
            self.count[state] += 1
            self.seen[state] = self.size
            state = self.link[state]
