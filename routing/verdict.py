"""Whether a drafter version on trial is as good as the current one: rejected when more than 5 % worse.

Compared are S, alpha and the P99 of the time per output token (TPOT). Noise decides nothing: a measure
rejects, or stops blocking, only when three standard errors of the comparison lie on one side of the 5 %.

**Errors.** One request is one observation, however many rounds it has, as its rounds resemble each other. So
alpha is the mean over requests, and tau a ratio over requests (Cochran 1977, 6.4).

**P99 of a shadow.** Its requests emit plainly, so nobody sees their TPOT; it is predicted on both sides:
TPOT of a request = T0 * (1 + extra / base) / tau, with the tau that its rounds would have had, the version's
own cost of a round, and one T0 (the plain step, in the mean over both sides), so that a difference in load
between the two is no difference between versions.

**P99 of few.** A sample's quantile needs a thousand requests before it has an upper bound at all. P99 is
taken from the mean and deviation of log TPOT, exact if that is normal. The error is that of the two moments
(by their influence function), whatever the distribution; where the same traffic is split between two
versions, a bias of the form is on both sides and cancels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, log, nan, sqrt
from typing import Literal, NamedTuple

import numpy as np

from gammaray.routing.measures import ERRORS
from gammaray.routing.window import COLUMN, WIDTH, Counts
from gammaray.types import Finished

WORSE = 0.05
TESTED, REQUESTS = 512, 20  # that each side needs
LIMIT_S = 86_400.0  # then the point estimates decide
Z99 = 2.3263478740408408  # quantile 0.99 of the normal distribution

Outcome = Literal["accept", "reject", "wait"]


class Measured(NamedTuple):
    """An estimate and its standard error; nan: unknown."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    reason: str
    numbers: Mapping[str, float]


@dataclass(slots=True)
class Ratio:
    """Of the sums of y and x over requests."""

    n: int = 0
    y: float = 0.0
    x: float = 0.0
    yy: float = 0.0
    xy: float = 0.0
    xx: float = 0.0

    def add(self, y: float, x: float) -> None:
        self.n += 1
        self.y, self.x = self.y + y, self.x + x
        self.yy, self.xy, self.xx = self.yy + y * y, self.xy + x * y, self.xx + x * x

    @property
    def measured(self) -> Measured:
        """nan without an x; the error below two requests."""
        if self.x == 0:
            return Measured(nan, nan)
        value = self.y / self.x
        squares = max(self.yy - 2 * value * self.xy + value**2 * self.xx, 0.0)
        return Measured(value, sqrt(squares * self.n / (self.n - 1)) / self.x if self.n > 1 else nan)


@dataclass(slots=True)
class Evidence:
    """What was seen of one version: `counts` [WIDTH] from windows, the rest from requests that ended."""

    counts: Counts = field(default_factory=lambda: np.zeros(WIDTH))
    tau: Ratio = field(default_factory=Ratio)
    alpha: Ratio = field(default_factory=Ratio)  # the mean over requests
    slowness: Counts = field(default_factory=lambda: np.zeros(5))  # power sums 0..4 of each one's log 1 / tau

    def add(self, ended: Finished) -> None:
        """A request that ended. One that never drafted tells nothing."""
        stats = ended.stats
        if stats.tested and stats.emitted:
            self.tau.add(stats.emitted, stats.rounds)
            self.alpha.add(stats.first_accepted / stats.tested, 1.0)
            self.slowness += log(stats.rounds / stats.emitted) ** np.arange(5)

    @property
    def enough(self) -> bool:
        return self.tested >= TESTED and self.alpha.n >= REQUESTS

    @property
    def tested(self) -> float:
        return float(self.counts[COLUMN["tested"]])

    @property
    def base_s(self) -> float:
        """Seconds of a round without this version's drafts; nan before the first."""
        rounds = float(self.counts[COLUMN["rounds"]])
        return float(self.counts[COLUMN["base_s"]]) / rounds if rounds else nan

    @property
    def cost(self) -> float:
        """A round's time by that without drafts; nan where no time is known."""
        base_s, extra_s = (float(self.counts[COLUMN[name]]) for name in ("base_s", "extra_s"))
        return 1.0 + extra_s / base_s if base_s else nan

    @property
    def speedup(self) -> Measured:
        """S; the profiled times are taken as they are."""
        value, error = self.tau.measured
        return Measured(value / self.cost, error / self.cost)


def predicted_p99(of: Evidence, other: Evidence) -> Measured:
    """TPOT in s of a version beside another, at the plain step of both together."""
    return p99(of.slowness, (of.base_s + other.base_s) / 2 * of.cost)


def p99(sums: Counts, scale: float = 1.0) -> Measured:
    """Quantile 0.99 of `scale` * x from the power sums 0..4 [5] of log x; nan below two values."""
    n = sums[0]
    if n < 2:
        return Measured(nan, nan)
    mean, square, cube, fourth = (float(each) for each in sums[1:] / n)
    variance = square - mean**2
    if variance <= 1e-12:  # all alike, up to rounding
        return Measured(scale * exp(mean), 0.0)
    third = cube - 3 * mean * square + 2 * mean**3
    kurtic = fourth - 4 * mean * cube + 6 * mean**2 * square - 3 * mean**4
    deviation = sqrt(variance)
    # The variance of (x - m) + z ((x - m)^2 - s^2) / (2 s), the influence of a value on m + z s.
    influence = variance + Z99 * third / deviation + Z99**2 * (kurtic - variance**2) / (4 * variance)
    value = scale * exp(mean + Z99 * deviation)
    return Measured(value, value * sqrt(max(influence, 0.0) / n))


def judge(shadow: Evidence, current: Evidence | None, waited_s: float = 0.0) -> Verdict:
    """On a shadow beside the current version; None: that decodes plainly.

    Beside plain decoding S must exceed 1. After LIMIT_S a current version without enough traffic counts as
    plain too, and a version on trial without enough is rejected.
    """
    over = waited_s >= LIMIT_S
    if not shadow.enough:
        found = f"{shadow.tested:.0f} tested tokens of {TESTED} in {shadow.alpha.n} requests of {REQUESTS}"
        return Verdict("reject" if over else "wait", f"too little traffic to judge it: {found}", {})
    if current is not None and not current.enough:
        if not over:
            return Verdict("wait", "too little traffic of the current version to judge beside it", {})
        current = None
    if current is None:
        return _decide([Comparison("S", shadow.speedup, Measured(1.0, 0.0), 1.0)], over)
    p99s = predicted_p99(shadow, current), predicted_p99(current, shadow)
    comparisons = [
        Comparison("S", shadow.speedup, current.speedup, 1.0 - WORSE),
        Comparison("alpha", shadow.alpha.measured, current.alpha.measured, 1.0 - WORSE),
        Comparison("tpot_p99_s", *p99s, 1.0 + WORSE, lower_is_better=True),
    ]
    return _decide(comparisons, over)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ours` may be `factor` * `theirs` at worst."""

    name: str
    ours: Measured
    theirs: Measured
    factor: float
    lower_is_better: bool = False

    @property
    def margin(self) -> float:
        """How much better than the worst that is allowed; nan: unknown."""
        margin = self.ours.value - self.factor * self.theirs.value
        return -margin if self.lower_is_better else margin

    @property
    def error(self) -> float:
        """Three standard errors of the margin."""
        return ERRORS * sqrt(self.ours.error**2 + (self.factor * self.theirs.error) ** 2)

    def __str__(self) -> str:
        way = "above" if self.lower_is_better else "below"
        return f"{self.name} {self.ours.value:.4g} is {way} {self.factor:g} of {self.theirs.value:.4g}"


def _decide(comparisons: list[Comparison], over: bool) -> Verdict:
    """What is unknown (nan) blocks, and is worse when time is over."""
    numbers = {c.name: c.ours.value for c in comparisons}
    numbers |= {f"current_{c.name}": c.theirs.value for c in comparisons}
    if worse := [c for c in comparisons if c.margin + c.error < 0]:
        return Verdict("reject", f"{worse[0]} beyond doubt", numbers)
    if not (unsure := [c for c in comparisons if not c.margin - c.error >= 0]):
        return Verdict("accept", "beyond doubt no measure is worse", numbers)
    if not over:
        return Verdict("wait", f"{', '.join(c.name for c in unsure)} may still be worse", numbers)
    if worse := [c for c in unsure if not c.margin >= 0]:
        return Verdict("reject", f"{worse[0]} when time was over", numbers)
    return Verdict("accept", "no measure was worse when time was over", numbers)
