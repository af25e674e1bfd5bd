"""The numbers of math.md section 4 from Counts rows [N, WIDTH], all keys at once; nan where nothing tells.

What costs and gains of another depth would be is in `depth.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gammaray.routing.window import CAUSES, COLUMN, TPOT_EDGES, VECTOR, Counts, Phases

ERRORS = 3.0  # standard errors of a bound: wide, since rounds of one request resemble each other
COVERED = 0.95  # of the accepted children, by the effective width
_BUCKETS = np.log(np.concatenate(([TPOT_EDGES[0] ** 2 / TPOT_EDGES[1]], TPOT_EDGES, TPOT_EDGES[-1:])))


def column(rows: Counts, name: str) -> Counts:
    """[N] of a scalar of window.SCALARS, [N, size] of a vector."""
    return rows[:, COLUMN[name]] if name in COLUMN else rows[:, VECTOR[name]]


def ratio(part: Counts, whole: Counts) -> Counts:
    """nan where the whole is 0."""
    result: Counts = np.full(np.broadcast_shapes(part.shape, whole.shape), np.nan)
    np.divide(part, whole, out=result, where=whole > 0)
    return result


def alpha(rows: Counts) -> Counts:
    """[N] acceptance: the share of first-tried children accepted among those tested."""
    return ratio(column(rows, "first_accepted"), column(rows, "tested"))


def level_acceptance(rows: Counts) -> Counts:
    """[N] share of tested levels at which any child was accepted."""
    return ratio(column(rows, "level_accepted").sum(1), column(rows, "level_tested").sum(1))


def draft_efficiency(rows: Counts) -> Counts:
    """[N] accepted nodes per drafted one."""
    return ratio(column(rows, "accepted"), column(rows, "drafted"))


def node_yield(rows: Counts) -> Counts:
    """[N] accepted nodes per verified one."""
    return ratio(column(rows, "accepted"), column(rows, "verified"))


def tau(rows: Counts) -> Counts:
    """[N] mean tokens emitted per round, the bonus token included."""
    return ratio(column(rows, "emitted"), column(rows, "rounds"))


def tau_bounds(rows: Counts) -> tuple[Counts, Counts]:
    """([N], [N]) tau less and more three standard errors; nan below two rounds."""
    rounds, mean = column(rows, "rounds"), tau(rows)
    squares = column(rows, "emitted_squared") - rounds * mean**2
    variance = ratio(np.maximum(squares, 0.0), rounds - 1)
    error = ERRORS * np.sqrt(ratio(variance, rounds))
    return mean - error, mean + error


def speedup(rows: Counts) -> Counts:
    """[N] S, the marginal step speed-up: tau * T0 / (T0 + extra); break-even is 1."""
    return tau(rows) * _time_kept(rows)


def speedup_bounds(rows: Counts) -> tuple[Counts, Counts]:
    """([N], [N]) S at the bounds of tau; the profiled times are taken as they are."""
    low, high = tau_bounds(rows)
    return low * _time_kept(rows), high * _time_kept(rows)


def _time_kept(rows: Counts) -> Counts:
    base_s = column(rows, "base_s")
    return ratio(base_s, base_s + column(rows, "extra_s"))


def se(rows: Counts) -> Counts:
    """[N] speculative efficiency, alpha * tau: for operators who know it, no alarm hangs on it."""
    return alpha(rows) * tau(rows)


def fallback_rate(rows: Counts, exclude_lost: NDArray[np.bool_]) -> Counts:
    """[N] FR: planned requests that ended plain. `exclude_lost` [N]: without those that lost their worker."""
    lost = np.where(exclude_lost, column(rows, "worker_lost"), 0.0)
    return ratio(causes(rows).sum(1) - lost, column(rows, "planned") - lost)


def causes(rows: Counts) -> Counts:
    """[N, len(CAUSES)] requests that ended plain against the plan."""
    return rows[:, [COLUMN[cause] for cause in CAUSES]]


def survival(rows: Counts, name: str = "level_first") -> Counts:
    """[N, LEVELS] share of tests at a level that its first-tried child passed; nan where untested.

    A level is tested when the one before was accepted, so the product of the first j is the chance to reach
    j. With `level_accepted` any child counts.
    """
    return ratio(column(rows, name), column(rows, "level_tested"))


def width(rows: Counts) -> Counts:
    """[N] nodes per verified level, in the mean."""
    return ratio(column(rows, "verified"), column(rows, "levels"))


def tree_width_effective(rows: Counts) -> Counts:
    """[N] TWE: the fewest ranks that hold 95 % of the accepted children, by the width drafted."""
    ranks = column(rows, "ranks")
    covered = ratio(np.cumsum(ranks, axis=1), ranks.sum(1, keepdims=True)) >= COVERED
    effective = np.where(covered.any(1), covered.argmax(1) + 1.0, np.nan)
    return effective / width(rows)


def tpot_quantile(rows: Counts, q: float) -> Counts:
    """[N] seconds per output token at quantile `q`, from the histogram; log-linear inside a bucket.

    What lies beyond the last edge counts as that edge, what lies below the first as one bucket below it.
    """
    counts = column(rows, "tpot")
    total = np.cumsum(counts, axis=1)
    rank = q * total[:, -1:]
    at = np.argmax((total >= rank) & (counts > 0), axis=1)[:, None]
    inside = np.take_along_axis(counts, at, axis=1)
    share = ratio(rank - np.take_along_axis(total, at, axis=1) + inside, inside)
    low, high = _BUCKETS[at], _BUCKETS[at + 1]
    seconds: Counts = np.exp(low + np.clip(share, 0.0, 1.0) * (high - low))
    return seconds[:, 0]


def kv_reuse(phases: Phases) -> tuple[float | None, float | None]:
    """KRR of target and draft: the share of prompt tokens seen before whose KV was still there."""
    target = phases.reused / phases.seen if phases.seen else None
    draft = phases.draft_reused / phases.draft_seen if phases.draft_seen else None
    return target, draft


def draft_latency(phases: Phases, rows: Counts) -> float | None:
    """T_draft per drafted token by T_AR, over all rows; T_AR is the mean step without any key's drafts."""
    drafted, rounds, base_s = (float(column(rows, name).sum()) for name in ("drafted", "rounds", "base_s"))
    return phases.draft_s / drafted / (base_s / rounds) if drafted and base_s else None
