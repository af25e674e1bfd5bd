"""The weekly health job: did the acceptance of a key's requests fall against the week before?"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from gammaray.routing.histogram import quantiles
from gammaray.types import WARMUP_CLASS, Finished, Key

WEEK_S = 7 * 86_400.0
SIZE = 1000  # requests sampled a week and key
FEWEST = 200  # of which quantiles are compared
FALL = 0.15  # of a quantile, against its last value
WATCHED = ("p50", "p95", "p99")

Quantiles = Mapping[str, float | None]


@dataclass(slots=True)
class Reservoir:
    """A uniform sample of the alphas that came by (Vitter 1985, algorithm R)."""

    seen: int = 0
    alphas: list[float] = field(default_factory=list)

    def add(self, alpha: float, rng: random.Random) -> None:
        self.seen += 1
        if len(self.alphas) < SIZE:
            self.alphas.append(alpha)
        elif (at := rng.randrange(self.seen)) < SIZE:
            self.alphas[at] = alpha


def compare(before: Quantiles, now: Quantiles) -> str | None:
    """A sentence when P50, P95 or P99 of alpha fell by more than 15 % of what it was, else None."""
    falls = [
        f"{name.upper()} fell from {was:.2f} to {is_:.2f}"
        for name in WATCHED
        if (was := before[name]) is not None and (is_ := now[name]) is not None and is_ < (1 - FALL) * was
    ]
    return f"acceptance is down on last week: {', '.join(falls)}" if falls else None


class HealthJob:
    """Samples finished requests, and once a week says which keys got worse. Synthetic traffic is left out."""

    def __init__(self, now: float, state: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        """`state`: what `state()` gave before; `now`: s since the epoch, where the first week begins."""
        kept = state or {"since": now, "reservoirs": [], "before": []}
        self._random = random.Random(seed)
        self._since: float = kept["since"]
        self._reservoirs = {_key(key): Reservoir(**fields) for key, fields in kept["reservoirs"]}
        self._before: dict[Key, Quantiles] = {_key(key): before for key, before in kept["before"]}

    def add(self, finished: Iterable[Finished]) -> None:
        for ended in finished:
            if ended.alpha is not None and ended.request_class != WARMUP_CLASS:
                self._reservoirs.setdefault(ended.key, Reservoir()).add(ended.alpha, self._random)

    def due(self, now: float) -> bool:
        """The week is over."""
        return now - self._since >= WEEK_S

    def run(self, now: float) -> dict[Key, str]:
        """Alarms of the week, if it is over; else none. Keys with few requests keep gathering them."""
        if not self.due(now):
            return {}
        self._since = now
        ready = {key: one for key, one in self._reservoirs.items() if len(one.alphas) >= FEWEST}
        latest = {key: quantiles(np.array(one.alphas)) for key, one in ready.items()}
        known = {key: compare(self._before[key], latest[key]) for key in latest if key in self._before}
        self._before |= latest
        self._reservoirs = {key: one for key, one in self._reservoirs.items() if key not in ready}
        return {key: alarm for key, alarm in known.items() if alarm is not None}

    def state(self) -> dict[str, Any]:
        """JSON-able, for the next process."""
        return {
            "since": self._since,
            "reservoirs": [[list(key), asdict(one)] for key, one in self._reservoirs.items()],
            "before": [[list(key), dict(before)] for key, before in self._before.items()],
        }


def _key(fields: list[Any]) -> Key:
    tenant, request_class, drafter = fields
    return tenant, request_class, drafter
