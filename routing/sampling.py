"""Shares of requests by a stable hash: the same request is always on the same side."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

# What is drawn for: each has noise of its own, so that none of the shares depends on another.
Purpose = Literal["enabled", "canary", "share", "explore"]


def position(request_id: str, purpose: Purpose) -> float:
    """Where a request lies in [0, 1): uniform over ids (BLAKE2b, RFC 7693, its person the purpose)."""
    digest = blake2b(request_id.encode(), digest_size=8, person=purpose.encode()).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # as many bits as a float holds: never 1.0


def is_among(share: float, request_id: str, purpose: Purpose) -> bool:
    """Whether it belongs to a share of requests; whoever is in a share is in every larger one."""
    return position(request_id, purpose) < share
