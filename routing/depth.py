"""Which draft depth would be fastest, from what was measured at other depths (math.md section 2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gammaray.routing.measures import ERRORS, alpha, column, ratio
from gammaray.routing.window import LEVELS, Counts

PRIOR = 10.0  # tests that the level before is worth: one lucky test of a deep level decides nothing
GAMMAS = np.arange(1, LEVELS + 1)
Depths = NDArray[np.int64]


def best_gamma(rows: Counts, most: int | Depths, tree: bool = False) -> tuple[Depths, Counts, Counts]:
    """([N], [N], [N]) gamma from 1 to `most` (one for all, or [N]) that maximises S, S at it, its low bound.

    0, nan, nan where no level was tested or no time is known. S(gamma) = tau(gamma) / (1 + gamma * c).
    A chain counts first-tried children; with `tree` any child counts, at the width that was drafted. The
    cost is that of the width drafted either way, so that of a chain is at most that.
    """
    passed, error2 = _survival(rows, "level_accepted" if tree else "level_first")
    expected = 1.0 + np.cumsum(np.cumprod(passed, axis=1), axis=1)
    cost = 1.0 + GAMMAS * level_cost(rows)[:, None]
    allowed = np.reshape(most, (-1, 1)) >= GAMMAS
    speedups = np.where(allowed, expected / cost, -np.inf)
    unknown = np.isnan(speedups).any(1)
    at = np.where(unknown, 0, speedups.argmax(1))[:, None]
    tau, steps = (np.take_along_axis(each, at, axis=1)[:, 0] for each in (expected, cost))
    low = np.maximum(1.0, tau - ERRORS * _error(expected, tau, passed, error2))
    nan = np.where(unknown, np.nan, 1.0)
    return np.where(unknown, 0, GAMMAS[at[:, 0]]), nan * tau / steps, nan * low / steps


def level_cost(rows: Counts) -> Counts:
    """[N] c: extra time per drafted level by the step's time without drafts."""
    extra, base = (column(rows, name) for name in ("extra_s", "base_s"))
    return ratio(ratio(extra, column(rows, "levels")), ratio(base, column(rows, "rounds")))


def _survival(rows: Counts, name: str) -> tuple[Counts, Counts]:
    """([N, LEVELS], [N, LEVELS]) conditional survival and its squared standard error.

    Each level starts from the one before, worth PRIOR tests, and the first from alpha. So beyond the deepest
    tested level the last one's survival goes on, and its error is large.
    """
    passes, tests = column(rows, name), column(rows, "level_tested")
    levels, before = [], alpha(rows)
    for level in range(LEVELS):
        before = (passes[:, level] + PRIOR * before) / (tests[:, level] + PRIOR)
        levels.append(before)
    survival = np.stack(levels, axis=1)
    return survival, survival * (1.0 - survival) / (tests + PRIOR + 1.0)


def _error(expected: Counts, tau: Counts, survival: Counts, error2: Counts) -> Counts:
    """[N] standard error of the chosen `tau` [N], by its derivative in each level's survival.

    tau is linear in one level's survival: the derivative is what this level and the deeper ones add, by it.
    """
    before = np.concatenate((np.ones_like(tau)[:, None], expected[:, :-1]), axis=1)
    added = np.maximum(tau[:, None] - before, 0.0)
    variance: Counts = (ratio(added, survival) ** 2 * error2).sum(1, where=survival > 0)
    return np.sqrt(variance)
