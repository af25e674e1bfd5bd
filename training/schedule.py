"""How far a run is, and the learning rate there: a linear rise, then half a cosine (arXiv 1608.03983)."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, isfinite, pi

from gammaray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Schedule:
    """`rate` is the highest, reached after the share `warmup` of the way; `least` is the last one's share.

    Without `minutes` the way is `steps` long, and the same seed gives the same drafter. With them it is over
    when either is used up, so that the rate has come down by then; how far it is depends on the clock, so a
    second run differs.
    """

    steps: int
    minutes: float | None = None
    rate: float = 8e-3
    warmup: float = 0.03
    least: float = 0.02

    def __post_init__(self) -> None:
        if self.steps < 1 or (self.minutes is not None and self.minutes <= 0):
            raise ConfigError(f"nothing to do in {self.steps} steps and {self.minutes} minutes: give more")
        if (
            not (isfinite(self.rate) and self.rate > 0)
            or not 0 <= self.warmup < 1
            or not 0 <= self.least <= 1
        ):
            raise ConfigError("a schedule needs a rate above 0, a warm-up below 1, a least share from 0 to 1")

    def after(self, done: float, seconds: float) -> float:
        """The share of the way that is done after one more step, which took so long; 1 at the end."""
        timed = 0.0 if self.minutes is None else seconds / (60 * self.minutes)
        there = done + max(1 / self.steps, timed)
        return 1.0 if there > 1 - 0.5 / self.steps else there  # sums of 1 / steps miss 1 by rounding

    def rate_at(self, done: float) -> float:
        """The learning rate of the step that begins where the share `done` is done."""
        if done < self.warmup:
            return self.rate * (done + 1 / self.steps) / (self.warmup + 1 / self.steps)
        falling = 0.5 + 0.5 * cos(pi * (done - self.warmup) / (1 - self.warmup))
        return self.rate * (self.least + (1 - self.least) * falling)
