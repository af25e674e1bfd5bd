"""The dip test of unimodality: J. A. and P. M. Hartigan, The Annals of Statistics 13 (1985) 70-84."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Indices = NDArray[np.int64]

SIMULATIONS = 1000
SIZES = (4, 10)  # exponents of 2: sqrt(n) * dip hardly depends on n, so few sizes are simulated


def dip(values: Values) -> tuple[float, float]:
    """(dip, p) of values [n]: p is the chance that n uniform ones, the hardest unimodal case, dip as much.

    The first call for a size simulates for about a second; n counts as the nearest power of 2, 16 to 1024.
    """
    if len(values) < 2:
        return 0.0, 1.0
    found = dip_statistic(values)
    size = 2 ** int(np.clip(np.rint(np.log2(len(values))), *SIZES))
    scaled = found * math.sqrt(len(values))
    as_deep = len(uniform_dips(size)) - np.searchsorted(uniform_dips(size), scaled)
    return found, float((1 + as_deep) / (1 + SIMULATIONS))


@lru_cache
def uniform_dips(size: int) -> Values:
    """Sorted sqrt(size) * dip of SIMULATIONS uniform samples."""
    random = np.random.default_rng(size)
    dips = sorted(dip_statistic(sample) for sample in random.random((SIMULATIONS, size)))
    return np.array(dips) * math.sqrt(size)


def dip_statistic(values: Values) -> float:
    """The largest distance of the values' distribution function F to the nearest unimodal one.

    Equal values are one jump of F. Below its mode the nearest one is convex and follows the greatest convex
    minorant of F, above it is concave and follows the least concave majorant. The interval that must hold the
    mode shrinks to where these are farthest apart, until that is no more than twice the distance outside.
    """
    points, times = np.unique(values, return_counts=True)
    after = np.cumsum(times).astype(np.float64)  # n * F at a point, and just before it
    before = after - times
    twice, low, high = 0.0, 0, len(points) - 1
    while low < high:
        part = slice(low, high + 1)
        convex = _Bound.below(points[part], before[part])
        concave = _Bound.above(points[part], after[part])
        gap, left, right = _farthest(convex, concave)
        if gap <= twice:
            break
        outside = (after[part] - convex.heights)[:left], (concave.heights - before[part])[right + 1 :]
        twice = max(twice, *(float(side.max(initial=0.0)) for side in outside))
        if (left, right) == (0, high - low):
            break
        low, high = low + left, low + right
    return twice / 2 / len(values)


class _Bound:
    """A convex minorant or concave majorant of points: the `knots` where it touches, `heights` everywhere."""

    def __init__(self, x: Values, y: Values, knots: Indices) -> None:
        self.knots, self.heights = knots, np.interp(x, x[knots], y[knots])

    @classmethod
    def below(cls, x: Values, y: Values) -> _Bound:
        return cls(x, y, _convex_knots(x, y))

    @classmethod
    def above(cls, x: Values, y: Values) -> _Bound:
        return cls(x, y, _convex_knots(x, -y))


def _convex_knots(x: Values, y: Values) -> Indices:
    """Drops what lies on or above the chord of its neighbours, all at once, until nothing does."""
    knots = np.arange(len(x))
    while True:
        run, rise = np.diff(x[knots]), np.diff(y[knots])
        below = np.concatenate(([True], rise[:-1] * run[1:] < rise[1:] * run[:-1], [True]))
        if below.all():
            return knots
        knots = knots[below]


def _farthest(convex: _Bound, concave: _Bound) -> tuple[float, int, int]:
    """The widest gap at a knot of either, and the interval from there to the nearest knot of the other."""
    gaps = concave.heights - convex.heights
    left = int(convex.knots[gaps[convex.knots].argmax()])
    right = int(concave.knots[gaps[concave.knots].argmax()])
    if gaps[left] >= gaps[right]:
        right = int(concave.knots[np.searchsorted(concave.knots, left)])
        return float(gaps[left]), left, right
    left = int(convex.knots[np.searchsorted(convex.knots, right, side="right") - 1])
    return float(gaps[right]), left, right
