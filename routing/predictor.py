"""A request's acceptance before its first draft: boosted trees as flat arrays, read with numpy alone.

Plain data: it is trained on the controller (`learning.py`), pickled, and asked in every ingress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CHUNK = 1024  # rows that walk together: bounds what `Trees.scores` allocates
ZERO = float(np.float32(1e-35))  # what is no further from 0 LightGBM reads as 0


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """All nodes of all trees in one table [M]. A leaf is its own child, so each walk takes `depth` steps."""

    feature: NDArray[np.int16]  # [M] column that the node looks at
    threshold: Floats  # [M] up to here, go left
    left: NDArray[np.int32]  # [M]
    right: NDArray[np.int32]  # [M]
    missing_left: NDArray[np.bool_]  # [M] where NaN goes
    value: Floats  # [M] of a leaf; 0 inside
    roots: NDArray[np.int32]  # [T]
    depth: int

    def scores(self, rows: Floats) -> Floats:
        """The sum over the trees of each row's leaf, in log-odds: rows [N, F] -> [N]."""
        parts = [self._walk(rows[at : at + CHUNK]) for at in range(0, len(rows), CHUNK)]
        return np.concatenate([np.empty(0), *parts])

    def _walk(self, rows: Floats) -> Floats:
        rows = np.where(np.abs(rows) <= ZERO, 0.0, rows)
        every = np.arange(len(rows))[:, None]
        node = np.broadcast_to(self.roots, (len(rows), len(self.roots)))  # [N, T]
        for _ in range(self.depth):
            x = rows[every, self.feature[node]]
            goes_left = (x <= self.threshold[node]) | (np.isnan(x) & self.missing_left[node])
            node = np.where(goes_left, self.left[node], self.right[node])
        total: Floats = self.value[node].sum(1)
        return total


@dataclass(frozen=True, slots=True, eq=False)
class Predictor:
    """`trees` of rows [width], calibrated by Platt's line over their score; None: withdrawn, no opinion."""

    version: int
    width: int
    trees: Trees | None = None
    slope: float = 1.0  # at least 0: calibration never turns the order round
    offset: float = 0.0

    def predict(self, features: Sequence[float]) -> float | None:
        """Acceptance in [0, 1]; None when withdrawn, or for features of another release."""
        if not self.reads(len(features)):
            return None
        return float(self.many(np.array([features], np.float64))[0])

    def reads(self, width: int) -> bool:
        """Whether it has an opinion of rows of this width."""
        return self.trees is not None and self.width == width

    def many(self, rows: Floats) -> Floats:
        """rows [N, width], of a width that it reads -> [N]."""
        assert self.trees is not None
        return logistic(self.slope * self.trees.scores(rows) + self.offset)


def logistic(x: Floats) -> Floats:
    """1 / (1 + e^-x), in a form that does not overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * x)
