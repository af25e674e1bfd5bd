"""Times cases one after the other in a budget of seconds. What time or memory does not allow is listed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from gammaray.kernels.bench.case import SEED, Case, Comparison, Roofs, Row, Skipped
from gammaray.kernels.bench.timing import Timer


class Budget:
    """Seconds since it was made, of `limit_s`."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock, self._began = limit_s, clock, clock()

    @property
    def spent_s(self) -> float:
        return self._clock() - self._began

    def allows(self, seconds: float) -> bool:
        return self.spent_s + seconds <= self._limit_s


@dataclass(slots=True)
class Found:
    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # cases that raised


def measure(cases: Sequence[Case], timer: Timer, roofs: Roofs, memory: int, budget: Budget) -> Found:
    """Our kernels in the order of `cases`; comparisons behind their row where a goal is about it, else last.

    `memory`: free bytes.
    """
    found = Found()
    for case in cases:
        what = f"{case.kernel} {case.shape}"
        if case.memory > memory:
            needs, free = case.memory / 2**30, memory / 2**30
            found.skipped.append(Skipped(what, f"needs {needs:.1f} GiB, {free:.1f} are free"))
        elif not budget.allows(case.seconds):
            found.skipped.append(Skipped(what, "out of time"))
        else:
            _row(case, what, timer, roofs, found)
            _compare([row for row in found.rows[-1:] if row.case is case and case.goal], found, timer, budget)
    _compare([row for row in found.rows if not row.case.goal], found, timer, budget)
    return found


def _row(case: Case, what: str, timer: Timer, roofs: Roofs, found: Found) -> None:
    try:
        torch.manual_seed(SEED)
        ready = case.prepare()
        us = timer(ready.run)
        found.rows.append(Row(case, us, ready.error(ready.run()), roofs))
    except torch.OutOfMemoryError:
        found.skipped.append(Skipped(what, "out of memory"))
    except Exception as problem:  # of a kernel: the others are still worth their rows
        found.failed.append(f"{what}: {_last_line(problem)}")


def _compare(rows: Sequence[Row], found: Found, timer: Timer, budget: Budget) -> None:
    """Cheap comparisons of all these rows before dear ones."""
    pairs = [(row, one) for row in rows for one in row.case.comparisons]
    for row, one in sorted(pairs, key=lambda pair: pair[1].seconds):
        reason = _add(row, one, timer) if budget.allows(one.seconds) else "out of time"
        if reason:
            found.skipped.append(Skipped(f"{one.name} {row.case.shape}", reason))


def _add(row: Row, one: Comparison, timer: Timer) -> str:
    """Why there is no time of it, or nothing."""
    try:
        row.others[one.name] = timer(one.prepare())
    except Exception as problem:  # not ours
        return _last_line(problem)
    return ""


def _last_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {(str(problem).strip().splitlines() or [''])[-1]}"
