"""What each tenant used on each day, in UTC, as windows tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta

from gammaray.routing.window import COLUMN, Window
from gammaray.types import WARMUP_CLASS

KEPT_DAYS = 62  # two whole months
COLUMNS = [COLUMN["finished"], COLUMN["prompt_tokens"], COLUMN["output_tokens"]]


@dataclass(frozen=True, slots=True)
class Usage:
    """Of sequences that ended. Synthetic traffic is the server's own, and counts for nobody."""

    sequences: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.sequences + other.sequences,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
        )

    @property
    def tokens(self) -> int:
        """What `tokens_per_day` limits."""
        return self.prompt_tokens + self.output_tokens


NONE = Usage()
Day = Mapping[str, Usage]  # by tenant


@dataclass(frozen=True, slots=True)
class Marks:
    """Of each source the last window that counted, and the day of it."""

    last: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    def knows(self, window: Window) -> bool:
        return window.number <= self.last.get(window.source, (0, ""))[0]

    def after(self, window: Window, day: str) -> Marks:
        """Without replicas that have been silent since the day before yesterday: they are gone."""
        alive = {source: mark for source, mark in self.last.items() if mark[1] >= before(day)}
        return Marks({**alive, window.source: (window.number, day)})


class Ledger:
    """`days`: what was kept of them, by their name, as in 2026-11-30."""

    def __init__(self, days: Mapping[str, Day] | None = None, marks: Marks | None = None) -> None:
        self._days = {name: dict(day) for name, day in (days or {}).items()}
        self.marks = marks or Marks()
        self._dirty: set[str] = set()

    def fold(self, window: Window, now: float) -> bool:
        """Counts a window on the day of `now` (s, Unix). False: it has been counted, and nothing changes."""
        if self.marks.knows(window):
            return False
        today = day_of(now)
        self.marks = self.marks.after(window, today)
        day = self._days.setdefault(today, {})
        for (tenant, request_class, _), row in zip(window.keys, window.counts[:, COLUMNS], strict=True):
            if request_class != WARMUP_CLASS and row.any():
                day[tenant] = day.get(tenant, NONE) + Usage(*map(int, row))
                self._dirty.add(today)
        return True

    def forget(self, now: float) -> None:
        """Days that are too old."""
        oldest = before(day_of(now), KEPT_DAYS)
        for name in [name for name in self._days if name < oldest]:
            del self._days[name]
            self._dirty.add(name)

    def dirty(self) -> set[str]:
        """Days that changed since this was asked last, also those that were forgotten."""
        dirty, self._dirty = self._dirty, set()
        return dirty

    def day(self, name: str) -> Day:
        """Empty for one that nobody used, or that is forgotten."""
        return dict(self._days.get(name, {}))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the days that are kept, oldest first."""
        return tuple(sorted(self._days))


def day_of(now: float) -> str:
    """The UTC day of a time (s, Unix)."""
    return datetime.fromtimestamp(now, UTC).date().isoformat()


def before(day: str, days: int = 1) -> str:
    return (date.fromisoformat(day) - timedelta(days=days)).isoformat()


def end_of(day: str) -> float:
    """When a UTC day is over (s, Unix)."""
    return datetime.combine(date.fromisoformat(before(day, -1)), datetime.min.time(), UTC).timestamp()
