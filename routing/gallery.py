"""What the overview keeps beside the evidence: samples of requests, series over ticks, the last decisions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gammaray.routing import measures
from gammaray.routing.audit import Decision
from gammaray.routing.evidence import Evidence, Rows
from gammaray.routing.fleets import SILENT_TICKS
from gammaray.routing.window import COLUMN, SLOWEST, WIDTH, Phases, Window
from gammaray.types import WARMUP_CLASS, Finished, Key

TICKS = 12  # of what is shown as now
KEPT_ALPHAS, KEPT_PAIRS, KEPT_TIMES = 400, 1000, 256  # of a key, a tenant, a tenant
KEPT_THROUGHPUT, KEPT_DECISIONS, KEPT_FINISHED = 120, 50, 512


@dataclass(slots=True)
class Samples:
    """Of a tenant's newest finished requests: (prompt tokens, alpha), and the times to their first token."""

    pairs: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEPT_PAIRS))
    first_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))


@dataclass(slots=True)
class _Source:
    window: Window  # the last, without its counts and requests
    silent: int = 0


class Gallery:
    """Numbers only: no token and no text ever gets here."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.ticked: float | None = None
        self.alphas: dict[Key, deque[float]] = {}
        self.tenants: dict[str, Samples] = {}
        self.decisions: deque[Decision] = deque(maxlen=KEPT_DECISIONS)
        self.throughput: deque[dict[str, Any]] = deque(maxlen=KEPT_THROUGHPUT)
        self.finished: deque[Finished] = deque(maxlen=KEPT_FINISHED)
        self._sources: dict[str, _Source] = {}
        self._phases: deque[Phases] = deque([Phases()], maxlen=TICKS)  # by tick, the last of which is open
        self._slowest: deque[list[tuple[Finished, Phases]]] = deque([[]], maxlen=TICKS)

    @property
    def running(self) -> int:
        """Sequences of the busiest replica."""
        return max((source.window.running for source in self._sources.values()), default=0)

    @property
    def windows(self) -> list[Window]:
        """The last of each replica, without counts."""
        return [source.window for source in self._sources.values()]

    @property
    def phases(self) -> Phases:
        """Of the last ticks."""
        return sum(self._phases, Phases())

    @property
    def slowest(self) -> list[tuple[Finished, Phases]]:
        """Of the last ticks, with the phases of their replica at that time."""
        told = [pair for tick in self._slowest for pair in tick]
        return sorted(told, key=lambda pair: -(pair[0].per_token_s or 0.0))[:SLOWEST]

    def fold(self, window: Window) -> None:
        empty = replace(window, keys=(), counts=np.zeros((0, WIDTH)), finished=(), slowest=())
        self._sources[window.source] = _Source(empty)
        self._phases[-1] += window.phases
        self._slowest[-1] += [(ended, window.phases) for ended in window.slowest]
        self.finished.extend(window.finished)
        for ended in window.finished:
            if ended.request_class != WARMUP_CLASS:
                self._sample(ended)

    def _sample(self, ended: Finished) -> None:
        samples = self.tenants.get(ended.tenant) or self.tenants.setdefault(ended.tenant, Samples())
        samples.first_s.append(ended.first_s)
        if (alpha := ended.alpha) is None:
            return
        samples.pairs.append((ended.prompt_tokens, alpha))
        kept = self.alphas.get(ended.key)
        if kept is None:
            kept = self.alphas[ended.key] = deque(maxlen=KEPT_ALPHAS)
        kept.append(alpha)

    def close(self, now: float, evidence: Evidence, touched: Rows) -> None:
        """Ends a tick."""
        counts = evidence.since(touched, 1).sum(0, keepdims=True)
        p99 = measures.tpot_quantile(counts[:, :WIDTH], 0.99)[0]
        self.throughput.append({
            "time": now,
            "tokens_per_s": float(counts[0, COLUMN["emitted"]]) / self.interval_s,
            "requests_per_s": float(counts[0, COLUMN["finished"]]) / self.interval_s,
            "tpot_p99_ms": None if np.isnan(p99) else 1e3 * float(p99),
        })  # fmt: skip
        self.ticked = now
        self._phases.append(Phases())
        self._slowest.append([])
        for name in list(self._sources):
            self._sources[name].silent += 1
            if self._sources[name].silent > SILENT_TICKS:
                del self._sources[name]

    def note(self, decisions: Iterable[Decision]) -> None:
        self.decisions.extend(decisions)

    def forget(self, tenants: Iterable[str]) -> None:
        """All samples of these."""
        gone = set(tenants)
        for tenant in gone & self.tenants.keys():
            del self.tenants[tenant]
        if gone:
            self.alphas = {key: kept for key, kept in self.alphas.items() if key[0] not in gone}
