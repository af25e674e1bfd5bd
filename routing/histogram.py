"""Acceptance of single requests: how it spreads, and whether it has two peaks (math.md section 4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gammaray.routing.dip import Values, dip

BINS = 25  # of 0.04
QUANTILES = (5, 50, 95, 99)
SIGNIFICANT, REQUESTS = 0.01, 200  # of the dip test
VALLEY = 0.5  # of the lower peak: what is deeper parts two peaks
LOWEST_PEAK = 0.1  # of the highest
SMOOTHING = np.array([1.0, 4.0, 6.0, 4.0, 1.0]) / 16


def quantiles(values: Values) -> dict[str, float | None]:
    """P5, P50, P95 and P99, of nothing None."""
    found = np.percentile(values, QUANTILES).tolist() if len(values) else [None] * len(QUANTILES)
    return {f"p{percent}": value for percent, value in zip(QUANTILES, found, strict=True)}


def histogram(alphas: Values) -> NDArray[np.int64]:
    """[BINS] requests in each; alpha 1 is in the last one."""
    return np.bincount(np.minimum((alphas * BINS).astype(np.int64), BINS - 1), minlength=BINS)


def peaks(alphas: Values) -> list[float]:
    """Acceptance at the middle of the bins where the smoothed histogram peaks, lowest first.

    Between two peaks it falls below half of the lower one; else only the higher one counts.
    """
    padded = np.pad(histogram(alphas), len(SMOOTHING) // 2, mode="symmetric")
    heights = np.convolve(padded, SMOOTHING, mode="valid")
    return [(bin_ + 0.5) / BINS for bin_ in _parted(heights, _tops(heights))]


def bimodal(alphas: Values) -> bool:
    """Two peaks with a valley between them that chance does not explain, in at least 200 requests.

    Alphas of few tokens lie on a grid, whose points are no modes: the dip test sees them spread over a bin.
    """
    if len(alphas) < REQUESTS or len(peaks(alphas)) < 2:
        return False
    spread = np.random.default_rng(0).uniform(-0.5, 0.5, len(alphas)) / BINS
    return dip(alphas + spread)[1] < SIGNIFICANT


def _tops(heights: Values) -> list[int]:
    left, right = np.pad(heights, (1, 0))[:-1], np.pad(heights, (0, 1))[1:]
    tops = (heights > left) & (heights >= right) & (heights >= LOWEST_PEAK * heights.max())
    return np.flatnonzero(tops).tolist()


def _parted(heights: Values, tops: list[int]) -> list[int]:
    kept: list[int] = []
    for top in tops:
        if not kept or heights[kept[-1] : top].min() < VALLEY * min(heights[kept[-1]], heights[top]):
            kept.append(top)
        elif heights[top] > heights[kept[-1]]:
            kept[-1] = top
    return kept
