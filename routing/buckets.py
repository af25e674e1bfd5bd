"""The draft shape that a tenant gives to requests of some acceptance."""

from __future__ import annotations

from collections.abc import Sequence

from gammaray.config import Bucket


def pick(buckets: Sequence[Bucket], alpha: float | None) -> Bucket | None:
    """The bucket of a predicted acceptance: [low, high), and 1 belongs to the highest one.

    `buckets` as configured: highest first, from 1 to 0 without a gap. None without them; without a prediction
    too, unless there is only one.
    """
    if not buckets or (alpha is None and len(buckets) > 1):
        return None
    if alpha is None:
        return buckets[0]
    return next((bucket for bucket in buckets if alpha >= bucket.alpha[0]), buckets[-1])
