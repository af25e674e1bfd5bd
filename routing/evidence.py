"""What was seen of every key, in columns: sums since ever, and what they were at the last ticks.

A window is the difference of two such sums, so it costs the same however many ticks it spans.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gammaray.routing.window import COLUMN, SCALARS, VECTOR, WIDTH, Counts

DEPTH = 12  # ticks that a window may span
WINDOW_S = 60.0  # ... as far as they fit into this
TESTED, PLANNED, LOST = COLUMN["tested"], COLUMN["planned"], COLUMN["worker_lost"]
EXCUSED = WIDTH  # requests that lost their worker in an incident: no longer in `planned` and `worker_lost`
SPAN = WIDTH + 1
ALL, RATES, DEPTHS = slice(0, SPAN), slice(0, len(SCALARS)), slice(0, VECTOR["tpot"].start)
Rows = NDArray[np.intp]


class Evidence:
    """`close` ends a tick; windows end with the last closed one. All rows are there, once reserved."""

    def __init__(self, interval_s: float) -> None:
        self.depth = int(np.clip(WINDOW_S / interval_s, 1, DEPTH))
        self._ticks = 0  # closed ones
        self._open = np.zeros((0, SPAN))  # sums, with those of the tick that is open
        self._past = np.zeros((self.depth + 1, 0, SPAN))  # sums at the end of tick t, at t % (depth + 1)
        self._base = np.zeros((0, SPAN))  # sums at the last clearing
        self._cleared = np.zeros(0, np.int64)  # the tick of it
        self._busy = np.zeros(0, np.bool_)  # counted into, in the open tick

    def reserve(self, rows: int) -> None:
        """Makes room for so many. A row that nobody counts into costs nothing but its memory."""
        if rows <= len(self._open):
            return
        more = rows + rows // 4 + 64 - len(self._open)
        self._open = np.concatenate((self._open, np.zeros((more, SPAN))))
        self._base = np.concatenate((self._base, np.zeros((more, SPAN))))
        self._past = np.concatenate((self._past, np.zeros((self.depth + 1, more, SPAN))), axis=1)
        self._cleared = np.concatenate((self._cleared, np.full(more, self._ticks)))
        self._busy = np.concatenate((self._busy, np.zeros(more, np.bool_)))

    def add(self, rows: Rows, counts: Counts) -> None:
        """`counts` [N, WIDTH] of different `rows` [N], into the open tick."""
        self._open[rows, :WIDTH] += counts
        self._busy[rows] = True

    def forget(self, row: int) -> None:
        """So that it may be another key's."""
        self._open[row] = self._base[row] = self._past[:, row] = 0.0
        self._busy[row] = False

    def close(self, excused: Rows) -> Rows:
        """The rows of this tick. FR leaves out requests of `excused` rows that lost their worker in it."""
        lost = self._open[excused, LOST] - self._now[excused, LOST]
        self._open[excused, PLANNED] -= lost
        self._open[excused, LOST] -= lost
        self._open[excused, EXCUSED] += lost
        self._ticks += 1
        self._now[:] = self._open
        touched = np.flatnonzero(self._busy)
        self._busy[:] = False
        return touched

    def clear(self, rows: Rows) -> None:
        """Their windows begin with the next tick."""
        self._base[rows] = self._now[rows] = self._open[rows]
        self._cleared[rows] = self._ticks

    @property
    def _now(self) -> Counts:
        now: Counts = self._past[self._ticks % (self.depth + 1)]
        return now

    def since(self, rows: Rows, ticks: Rows | int, columns: slice = ALL) -> Counts:
        """[N, columns] counts of `rows` [N] over the newest `ticks`, as far as they were not cleared."""
        start = self._ticks - np.minimum(ticks, self.depth)
        past = self._past[start % (self.depth + 1), rows, columns]
        cleared = start < self._cleared[rows]
        past[cleared] = self._base[rows[cleared], columns]
        counts: Counts = self._now[rows, columns] - past
        return counts

    def recent(self, rows: Rows) -> Counts:
        """[N, SPAN] counts of the whole window, cleared or not: for people."""
        counts: Counts = self._now[rows] - self._past[(self._ticks - self.depth) % (self.depth + 1)][rows]
        return counts

    def seconds(self, interval_s: float) -> float:
        """How long that window is."""
        return interval_s * max(1, min(self._ticks, self.depth))

    def total(self, rows: Rows, columns: slice = ALL) -> Counts:
        """[N, columns] counts since the last clearing."""
        counts: Counts = self._now[rows, columns] - self._base[rows, columns]
        return counts

    def span(self, rows: Rows, group: Rows, groups: int, name: str, least: int) -> Rows:
        """[groups] ticks until the `rows` [N] of each `group` [N] hold `least` of a scalar.

        0: not even the whole window does, or the last tick has none and so tells nothing new.
        """
        column = slice(COLUMN[name], COLUMN[name] + 1)
        spans = np.zeros(groups, np.intp)
        wanted = np.bincount(group, self.since(rows, 1, column)[:, 0], groups) > 0
        for ticks in range(1, self.depth + 1):
            left = wanted[group]
            sums = np.bincount(group[left], self.since(rows[left], ticks, column)[:, 0], groups)
            spans[wanted & (sums >= least)] = ticks
            wanted &= sums < least
            if not wanted.any():
                break
        return spans


def sums(counts: Counts, group: Rows, groups: int) -> Counts:
    """[groups, columns] of `counts` [N, columns]."""
    if groups == len(group) and (group == np.arange(groups)).all():
        return counts
    return np.stack([np.bincount(group, column, groups) for column in counts.T], axis=1)
