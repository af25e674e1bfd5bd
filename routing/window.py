"""What one replica saw of each key since it told last, in columns of numbers: thousands of keys fold fast.

A Collector listens to StepReports and gives a Window each interval; whoever decides adds windows up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from heapq import nlargest
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from gammaray.types import Cause, DraftLinks, Finished, Key, KeyCounts, SpeculationStats, StepReport

Counts = NDArray[np.float64]

CAUSES: tuple[Cause, ...] = get_args(Cause)
SCALARS = (
    "rounds",
    "drafted",
    "verified",
    "accepted",
    "emitted",
    "emitted_squared",  # of each round, for the variance of tau
    "tested",
    "first_accepted",
    "levels",  # of the trees verified
    "base_s",  # see KeyCounts
    "extra_s",
    "planned",  # sequences that ended and were to speculate
    *CAUSES,  # ... of them those that ended plainly
    "finished",  # sequences that ended, plain ones too
    "prompt_tokens",
    "output_tokens",
)
LEVELS, RANKS = 16, 8
TPOT_EDGES = np.geomspace(0.0005, 10.0, 63)  # s; 64 buckets, 17 % wide
SAMPLES = 256  # finished sequences of a window that are told one by one
SLOWEST = 10


def _layout() -> tuple[dict[str, int], dict[str, slice], int]:
    """Column of each scalar, columns of each vector, and how many there are."""
    vectors, at = {}, len(SCALARS)
    sizes = {"level_tested": LEVELS, "level_first": LEVELS, "level_accepted": LEVELS, "ranks": RANKS}
    for name, size in (sizes | {"tpot": len(TPOT_EDGES) + 1}).items():
        vectors[name] = slice(at, at + size)
        at += size
    return {name: i for i, name in enumerate(SCALARS)}, vectors, at


COLUMN, VECTOR, WIDTH = _layout()


@dataclass(frozen=True, slots=True)
class Phases:
    """Sums over the steps of a window, in seconds."""

    steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    schedule_s: float = 0.0
    commit_s: float = 0.0
    seen: int = 0  # prompt tokens of the target that could have been cached, see Reuse
    reused: int = 0
    draft_seen: int = 0
    draft_reused: int = 0

    def __add__(self, other: Phases) -> Phases:
        return Phases(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Window:
    """`counts` [K, WIDTH] belongs to `keys`. Told again after an error, a window has its `number` again."""

    source: str  # of the replica; another one after a restart
    number: int
    keys: tuple[Key, ...]
    counts: Counts
    finished: tuple[Finished, ...] = ()  # a uniform sample
    slowest: tuple[Finished, ...] = ()  # by time per output token
    links: tuple[DraftLinks, ...] = ()  # now
    phases: Phases = Phases()
    running: int = 0  # sequences, at the last step
    waiting: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0


class Collector:
    """One thread calls `add`; `take` may come from another one, if that holds the same lock."""

    def __init__(self, source: str) -> None:
        self._source, self._number = source, 0
        self._random = random.Random(source)
        self._clear()

    def _clear(self) -> None:
        self._rows: dict[Key, Counts] = {}
        self._sample: list[Finished] = []
        self._ended = 0
        self._slowest: list[Finished] = []
        self._phases = Phases()
        self._last: StepReport | None = None

    def add(self, report: StepReport) -> None:
        for part in report.counts:
            _add_counts(self._row(part.key), part)
        for ended in report.finished:
            self._end(ended)
        times = report.draft_s, report.verify_s, report.schedule_s, report.commit_s
        self._phases += Phases(1, *times, *astuple(report.target_reuse), *astuple(report.draft_reuse))
        self._last = report

    def take(self, links: tuple[DraftLinks, ...] = ()) -> Window:
        """All since the last time."""
        self._number += 1
        keys, last = tuple(self._rows), self._last
        window = Window(
            self._source,
            self._number,
            keys,
            np.array([self._rows[key] for key in keys]).reshape(len(keys), WIDTH),
            tuple(self._sample),
            tuple(self._slowest),
            links,
            self._phases,
            last.running if last else 0,
            last.waiting if last else 0,
            last.kv_used_blocks if last else 0,
            last.kv_total_blocks if last else 0,
        )
        self._clear()
        return window

    def _row(self, key: Key) -> Counts:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = np.zeros(WIDTH)
        return row

    def _end(self, ended: Finished) -> None:
        _add_finished(self._row(ended.key), ended)
        self._ended += 1
        if len(self._sample) < SAMPLES:
            self._sample.append(ended)
        elif (at := self._random.randrange(self._ended)) < SAMPLES:  # Vitter 1985, algorithm R
            self._sample[at] = ended
        self._slowest = nlargest(SLOWEST, [*self._slowest, ended], key=lambda one: one.per_token_s or 0.0)


def _add_counts(row: Counts, part: KeyCounts) -> None:
    stats = part.stats
    add_stats(row, stats)
    row[COLUMN["base_s"]] += part.base_s
    row[COLUMN["extra_s"]] += part.extra_s


def add_stats(row: Counts, stats: SpeculationStats) -> None:
    """Into a row [WIDTH]."""
    row[:9] += (
        stats.rounds,
        stats.drafted,
        stats.verified,
        stats.accepted,
        stats.emitted,
        sum(k * k * rounds for k, rounds in enumerate(stats.lengths)),
        stats.tested,
        stats.first_accepted,
        stats.levels,
    )
    for name in ("level_tested", "level_first", "level_accepted", "ranks"):
        _add_vector(row[VECTOR[name]], getattr(stats, name))


def _add_vector(part: Counts, values: Sequence[int]) -> None:
    """What lies beyond the last column counts there."""
    part[: len(values)] += values[: len(part)]
    if len(values) > len(part):
        part[-1] += sum(values[len(part) :])


def _add_finished(row: Counts, ended: Finished) -> None:
    row[COLUMN["finished"]] += 1
    row[COLUMN["prompt_tokens"]] += ended.prompt_tokens if ended.index == 0 else 0
    row[COLUMN["output_tokens"]] += ended.output_tokens
    if ended.drafter is not None and not ended.shadow:
        row[COLUMN["planned"]] += 1
        if ended.fallback is not None:
            row[COLUMN[ended.fallback]] += 1
    if ended.per_token_s is not None:
        row[VECTOR["tpot"].start + int(np.searchsorted(TPOT_EDGES, ended.per_token_s))] += 1
