"""What the controller learns from finished requests: each key's prior, and a predictor for the routers.

    controller:  priors.add(finished); learner.add(finished); learner.maybe_train(now) in a thread of its own
    routers:     features(..., prior) -> predictor.predict(...), else the prior, else the class's histogram

Of a request its features, rate and tenant are kept, in memory only.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from threading import Lock

import numpy as np

from gammaray.routing.boosting import grow
from gammaray.routing.calibration import beats, platt
from gammaray.routing.features import PRIOR, WIDTH
from gammaray.routing.predictor import Floats, Predictor
from gammaray.types import WARMUP_CLASS, Finished, Key, SpeculationStats

# Tokens of a request at least. Few, as one whose breaker opens has little more than its 16 rounds tested: to
# leave those out would be to learn from the good ones only.
TESTED = 8
HEAVIEST = 256  # tested tokens that count: beyond them a request tells of itself only
LEAST, MOST = 64, 256  # requests behind a prior
BAND = (0.4, 0.85)  # of a prior (math.md section 5)
CAPACITY, EVERY, APART_S = 20_000, 500, 60.0
DRAWS = 8  # samples of which one makes room, see Reservoir
HELD_OUT = 0.2  # the newest; half of it calibrates, half judges


def tells(finished: Finished) -> bool:
    """Whether something can be learnt of acceptance from it."""
    return sum(finished.stats.tries) >= TESTED and finished.request_class != WARMUP_CLASS


def rate(stats: SpeculationStats) -> float:
    """Of all rounds, trimmed or not: of one request the others are too few, and no state hangs on it."""
    return stats.first_hits / sum(stats.tries)


class Priors:
    """The acceptance of each key's requests: their mean up to MOST, from then on an EWMA over as many."""

    def __init__(self) -> None:
        self._of: dict[Key, tuple[int, float]] = {}  # requests, MOST at most, and mean

    def add(self, finished: Finished) -> None:
        if not tells(finished):
            return
        count, mean = self._of.get(finished.key, (0, 0.0))
        count = min(count + 1, MOST)
        alpha = rate(finished.stats)
        self._of[finished.key] = count, mean + (alpha - mean) / count

    def of(self, key: Key) -> float | None:
        """Within BAND; None before LEAST requests."""
        count, mean = self._of.get(key, (0, 0.0))
        return min(max(mean, BAND[0]), BAND[1]) if count >= LEAST else None

    def forget(self, tenants: Collection[str]) -> None:
        """Those of tenants that went: another one of the same name begins anew."""
        self._of = {key: known for key, known in self._of.items() if key[0] not in tenants}

    def snapshot(self) -> Mapping[Key, float]:
        """Of all keys that have one."""
        return {key: prior for key in self._of if (prior := self.of(key)) is not None}


@dataclass(frozen=True, slots=True)
class Samples:
    """N finished requests, oldest first."""

    rows: Floats  # [N, WIDTH]
    rates: Floats  # [N] of acceptance
    weights: Floats  # [N] tested tokens, HEAVIEST at most

    def between(self, start: int, stop: int) -> Samples:
        part = slice(start, stop)
        return Samples(self.rows[part], self.rates[part], self.weights[part])

    def split(self) -> tuple[Samples, Samples, Samples]:
        """To train on, to calibrate with, to judge by: in the order of time, as a predictor looks ahead."""
        count = len(self.rates)
        first, second = int(count * (1 - HELD_OUT)), int(count * (1 - HELD_OUT / 2))
        return self.between(0, first), self.between(first, second), self.between(second, count)


class Reservoir:
    """`capacity` samples. When it is full, each new one takes the place of an older one of a busy tenant.

    Of DRAWS random samples the one goes whose tenant has most: a noisy tenant only displaces itself, nothing
    is scanned, and within a tenant ages are spread geometrically, so that what is learnt follows the traffic.
    """

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self._rows = np.empty((capacity, WIDTH))
        self._rates, self._weights = np.empty(capacity), np.empty(capacity)
        self._numbers = np.empty(capacity, np.int64)  # in the order they came
        self._tenants: list[str] = []  # of each place that is taken
        self._counts: dict[str, int] = {}
        self._added = 0
        self._random = random.Random(seed)

    def add(self, finished: Finished) -> None:
        place = self._place(finished.tenant)
        self._rows[place] = finished.forecast.features
        self._rates[place] = rate(finished.stats)
        self._weights[place] = min(sum(finished.stats.tries), HEAVIEST)
        self._numbers[place] = self._added
        self._added += 1

    def samples(self) -> Samples:
        """Copies."""
        order = np.argsort(self._numbers[: len(self._tenants)])
        return Samples(self._rows[order], self._rates[order], self._weights[order])

    def counts(self) -> Mapping[str, int]:
        """Samples of each tenant."""
        return dict(self._counts)

    def _place(self, tenant: str) -> int:
        if len(self._tenants) < len(self._rows):
            self._tenants.append(tenant)
            place = len(self._tenants) - 1
        else:
            draws = [int(self._random.random() * len(self._tenants)) for _ in range(DRAWS)]
            place = max(draws, key=lambda one: self._counts[self._tenants[one]])
            self._leave(self._tenants[place])
            self._tenants[place] = tenant
        self._counts[tenant] = self._counts.get(tenant, 0) + 1
        return place

    def _leave(self, tenant: str) -> None:
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]


class Learner:
    """Trains a predictor every EVERY samples, APART_S apart at least, and lets it out only when it is better.

    `maybe_train` may run in a thread of its own while another one adds; never two of it at once. `version` is
    the last one that routers may have: those of a later life of the controller must be above it.
    """

    def __init__(self, capacity: int = CAPACITY, version: int = 0) -> None:
        self.predictor: Predictor | None = None  # the newest that was let out
        self._version = version
        self._kept = Reservoir(capacity)
        self._lock = Lock()
        self._new = 0
        self._trained_at = -inf

    def add(self, finished: Finished) -> None:
        if tells(finished) and len(finished.forecast.features) == WIDTH:
            with self._lock:
                self._kept.add(finished)
                self._new += 1

    def maybe_train(self, now: float) -> Predictor | None:
        """What routers should have from now on: a better predictor, or a withdrawn one when that which they
        have has become worse than the prior; None when nothing changes. `now` in seconds.
        """
        with self._lock:
            if self._new < EVERY or now - self._trained_at < APART_S:
                return None
            self._new, self._trained_at = 0, now
            samples = self._kept.samples()
        decided = decide(samples, self.predictor, self._version + 1)
        if decided is not None:
            self.predictor, self._version = decided, decided.version
        return decided


def decide(samples: Samples, current: Predictor | None, version: int) -> Predictor | None:
    """A predictor that beats the prior, a constant and the current one; a withdrawn one; or None."""
    training, calibrating, judging = samples.split()
    ours = train(training, calibrating, version)
    constant = np.full(len(judging.rates), np.average(training.rates, weights=training.weights))
    known = judging.rows[:, PRIOR]
    prior = np.where(np.isnan(known), constant, known)
    standing = current.many(judging.rows) if current is not None and current.reads(WIDTH) else None

    def beaten(rival: Floats, alphas: Floats) -> bool:
        return beats(alphas, rival, judging.rates, judging.weights)

    rivals = [prior, constant] if standing is None else [prior, constant, standing]
    alphas = ours.many(judging.rows)
    if all(beaten(rival, alphas) for rival in rivals):
        return ours
    withdrawn = standing is not None and beaten(standing, prior)
    return Predictor(version, WIDTH) if withdrawn else None


def train(training: Samples, calibrating: Samples, version: int) -> Predictor:
    """Takes about half a second for 16,000 samples."""
    trees = grow(training.rows, training.rates, training.weights)
    line = platt(trees.scores(calibrating.rows), calibrating.rates, calibrating.weights)
    return Predictor(version, WIDTH, trees, *line)
