"""How deep one request drafts, by how its own last rounds went: what is faster than the controller's tick."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

ROUNDS = 16
GOOD, POOR = 0.6, 0.3  # alpha over the last rounds: above, all that is allowed; below, hardly any
MIDDLE_DEPTH, POOR_DEPTH = 4, 2
HOT = 0.8  # temperature, above which acceptance is a guess until so many tokens of the request were tested
HOT_TESTED, HOT_DEPTH = 32, 1


@dataclass(frozen=True, slots=True)
class Trial:
    """A round whose draft was tested. Costs as in KeyCounts."""

    tested: int
    first_accepted: int
    emitted: int
    base_s: float
    extra_s: float


@dataclass(slots=True)
class Breaker:
    """Of one sequence. `open`: it goes on plainly, to its end."""

    open: bool = False
    tested: int = 0
    _last: deque[Trial] = field(default_factory=lambda: deque(maxlen=ROUNDS))

    def add(self, done: Trial) -> None:
        self.tested += done.tested
        self._last.append(done)
        alpha = self.alpha
        self.open |= alpha is not None and alpha < POOR and self._speedup() < 1

    @property
    def alpha(self) -> float | None:
        """Over the last rounds; None before there are enough of them."""
        if len(self._last) < ROUNDS:
            return None
        return sum(r.first_accepted for r in self._last) / sum(r.tested for r in self._last)

    def limit(self, most: int, hot: bool) -> int:
        """The depth that it may have, of `most`. `hot`: it begins with one level."""
        if hot and self.tested < HOT_TESTED:
            return min(most, HOT_DEPTH)
        alpha = self.alpha
        if alpha is None or alpha > GOOD:
            return most
        return min(most, MIDDLE_DEPTH if alpha >= POOR else POOR_DEPTH)

    def _speedup(self) -> float:
        """S = tau * T0 / (T0 + dT); without a profile nobody knows, and it counts as a gain."""
        base = sum(r.base_s for r in self._last)
        extra = sum(r.extra_s for r in self._last)
        tau = sum(r.emitted for r in self._last) / len(self._last)
        return tau * base / (base + extra) if base else tau
