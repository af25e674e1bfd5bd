"""How deep and wide a draft may be: the least of what request, tenant and controller allow."""

from __future__ import annotations

from dataclasses import dataclass

from gammaray.config import Bucket, Speculation
from gammaray.types import KeyPolicy, Wish

Notes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """`gamma` 0: plain decoding. `notes`: a sentence for each wish that was cut back."""

    gamma: int
    width: int
    notes: Notes = ()


def shape(wish: Wish, own: Speculation, bucket: Bucket | None, policy: KeyPolicy) -> Shape:
    """Within the tenant's bucket if the acceptance is foretold, else within its gamma and tree_width.

    A key that is held back or on probation drafts chains.
    """
    deep, wide = (bucket.gamma, bucket.width) if bucket else (own.gamma, own.tree_width)
    children = 1 if policy.state in ("contract", "probe") else policy.width
    gamma, cut = _least("gamma", wish.gamma, deep, policy.gamma)
    width, narrowed = _least("width", wish.width, wide, children)
    return Shape(gamma, width, cut + narrowed)


def _least(name: str, wanted: int | None, own: int, allowed: int) -> tuple[int, Notes]:
    limit = min(own, allowed)
    if wanted is None or wanted <= limit:
        return limit if wanted is None else wanted, ()
    whose = "the limit of this tenant" if limit == own else "the limit of this tenant at the moment"
    return limit, (f"{name} {wanted} was cut to {limit}, {whose}",)
