"""The numbers of many units at once: columns [U], nan where a unit's evidence is not enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gammaray.routing.depth import Depths, best_gamma
from gammaray.routing.evidence import DEPTHS, PLANNED, RATES, TESTED, Evidence, Rows, sums
from gammaray.routing.measures import alpha, fallback_rate, speedup, speedup_bounds
from gammaray.routing.rules import MOST_GAMMA
from gammaray.routing.window import Counts

ENOUGH_TESTED, ENOUGH_PLANNED = 200, 20
MANY_TESTED = 2000  # for the best depth, as deep levels are reached rarely; else the whole window
GAIN = 1.01  # in S, of a deeper draft


@dataclass(frozen=True, slots=True)
class Columns:
    """See states.Facts for what each is."""

    alpha: Counts
    s: Counts
    s_low: Counts
    s_high: Counts
    fr: Counts
    fr_all: Counts
    best: Counts
    tested: Counts
    probe_low: Counts
    probe_fr: Counts

    def rows(self, units: Sequence[int]) -> list[dict[str, Any]]:
        """What to make Facts of."""
        numbers = zip(*(getattr(self, name)[units].tolist() for name in NAMES), strict=True)
        found = [dict(zip(NAMES, each, strict=True)) for each in numbers]
        return [{**each, "best": int(each["best"])} for each in found]

    def mask(self, units: NDArray[np.bool_]) -> None:
        """Nothing is known of these."""
        for name in NAMES:
            getattr(self, name)[units] = 0.0 if name in ("best", "tested") else np.nan


NAMES = [field.name for field in fields(Columns)]


def unknown(units: int) -> Columns:
    numbers = {name: np.full(units, 0.0 if name in ("best", "tested") else np.nan) for name in NAMES}
    return Columns(**numbers)


def rates(columns: Columns, evidence: Evidence, rows: Rows, unit: Rows) -> None:
    """Acceptance and S of the units [N] that the rows [N] belong to."""
    units, group = np.unique(unit, return_inverse=True)
    ticks = evidence.span(rows, group, len(units), "tested", ENOUGH_TESTED)
    known = ticks[group] > 0
    counts = evidence.since(rows[known], ticks[group[known]], RATES)
    found = sums(counts, group[known], len(units))
    columns.alpha[units], columns.s[units] = alpha(found), speedup(found)
    columns.s_low[units], columns.s_high[units] = speedup_bounds(found)


def fallbacks(rate: Counts, evidence: Evidence, rows: Rows, unit: Rows) -> None:
    """Sets FR in `rate` [U]."""
    units, group = np.unique(unit, return_inverse=True)
    ticks = evidence.span(rows, group, len(units), "planned", ENOUGH_PLANNED)
    known = ticks[group] > 0
    found = sums(evidence.since(rows[known], ticks[group[known]], RATES), group[known], len(units))
    rate[units] = fallback_rate(found, np.zeros(len(units), np.bool_))


def depths(columns: Columns, evidence: Evidence, rows: Rows, gamma: Depths, most: Depths) -> None:
    """The best depth of keys with known rates (row i is unit i), now at `gamma` [N], up to `most` [N].

    Neighbouring depths are nearly as good: so that noise moves nobody, a deeper one must gain something.
    """
    ticks = evidence.span(rows, np.arange(len(rows)), len(rows), "tested", MANY_TESTED)
    counts = evidence.since(rows, np.where(ticks > 0, ticks, evidence.depth), DEPTHS)
    best, s, _ = best_gamma(counts, np.minimum(most, MOST_GAMMA))
    _, s_now, _ = best_gamma(counts, gamma)
    columns.best[rows] = np.where((best > gamma) & (s < GAIN * s_now), gamma, best)


def probes(columns: Columns, evidence: Evidence, rows: Rows, unit: Rows, most: Depths) -> None:
    """What probing units saw since they began; `most` [U] depth of each."""
    units, group = np.unique(unit, return_inverse=True)
    found = sums(evidence.total(rows, DEPTHS), group, len(units))
    limit = np.minimum(most[units], MOST_GAMMA)
    columns.tested[units], columns.probe_low[units] = found[:, TESTED], best_gamma(found, limit)[2]
    # A probe is a few requests. One of them that fell back is no rate.
    rate = fallback_rate(found, np.zeros(len(units), np.bool_))
    columns.probe_fr[units] = np.where(found[:, PLANNED] >= ENOUGH_PLANNED, rate, np.nan)
