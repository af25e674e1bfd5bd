"""Whether predicted acceptance can be believed: Platt's line, the Brier score, and when one beats another."""

from __future__ import annotations

import numpy as np

from gammaray.routing.predictor import Floats, logistic

STEPS = 25  # of Newton's method; it is done after a handful
STEEPEST = 4.0
SURE = 3.0  # standard errors


def platt(scores: Floats, rates: Floats, weights: Floats) -> tuple[float, float]:
    """Slope and offset of the logistic line through rates [N] over scores [N] (Platt 1999).

    One request of mean weight stands for the identity, so that few requests hardly bend it.
    """
    identity = np.array([1.0, 0.0])
    line, weights = identity, weights / weights.mean()
    inputs = np.stack([scores, np.ones_like(scores)], 1)  # [N, 2]
    for _ in range(STEPS):
        p = logistic(inputs @ line)
        slope = inputs.T @ (weights * (p - rates)) + line - identity
        curve = (inputs * (weights * p * (1 - p))[:, None]).T @ inputs + np.eye(2)
        line = np.clip(line - np.linalg.solve(curve, slope), [0.0, -10.0], [STEEPEST, 10.0])
    return float(line[0]), float(line[1])


def brier(alphas: Floats, rates: Floats) -> Floats:
    """Brier's score per tested token of each request [N]: [a (1-p)^2 + (n-a) p^2] / n, of rate a / n."""
    return rates * (1 - alphas) ** 2 + (1 - rates) * alphas**2


def beats(ours: Floats, theirs: Floats, rates: Floats, weights: Floats) -> bool:
    """Whether our predictions [N] of `rates` have the lower Brier score, by SURE standard errors at least."""
    share, gain = weights / weights.sum(), brier(theirs, rates) - brier(ours, rates)
    mean = share @ gain
    return bool(mean > SURE * np.sqrt(share**2 @ (gain - mean) ** 2))
