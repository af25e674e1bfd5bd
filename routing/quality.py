"""Whether what is verified still is the dense model: KL in nats, teacher-forced (math.md section 4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gammaray.types import Quality

TOKENS = 200  # before the gate decides


def correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    """Pearson's r of pairs [n], as of alpha with KL or perplexity; None where one of them does not vary."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def mean_kl(samples: Sequence[Quality]) -> float | None:
    """Nats per token, each sample weighted with its tokens."""
    tokens = sum(sample.tokens for sample in samples)
    return sum(sample.tokens * sample.kl for sample in samples) / tokens if tokens else None


def perplexity(samples: Sequence[Quality]) -> float | None:
    """Of all the samples' tokens as one text under the target."""
    tokens = sum(sample.tokens for sample in samples)
    nats = sum(sample.tokens * float(np.log(sample.perplexity)) for sample in samples)
    return float(np.exp(nats / tokens)) if tokens else None
