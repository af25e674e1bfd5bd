"""Who of the tenants is served next, and how much of what is short each gets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import accumulate


class Service:
    """Virtual token counters (Sheng et al., arXiv 2401.00588): tokens that each tenant was served, by weight.

    The tenant with the least is next. One that did not wait for a while gets no credit for it.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._last = ""  # who was admitted

    def enter(self, tenant: str, waiting: Collection[str]) -> None:
        """It waits from now on; `waiting` did so before. It begins no better off than the best of these, or,
        without any, than whoever was admitted last."""
        least = min(self._served.get(other, 0.0) for other in waiting or [self._last])
        self._served[tenant] = max(self._served.get(tenant, 0.0), least)

    def admit(self, tenant: str) -> None:
        self._last = tenant

    def charge(self, tenant: str, tokens: int, weight: float) -> None:
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens / weight

    def order(self, tenants: Collection[str]) -> list[str]:
        """The least served first; of equals, the one that waits longest, as `tenants` has them."""
        return sorted(tenants, key=lambda tenant: self._served.get(tenant, 0.0))


def share_room(wants: Mapping[str, int], weights: Mapping[str, float], room: int) -> dict[str, int]:
    """Max-min: nobody gets more than it wants, and what it leaves goes to the others by their weights."""
    shares: dict[str, int] = {}
    by_need = sorted(wants, key=lambda tenant: wants[tenant] / weights.get(tenant, 1.0))
    own = [weights.get(tenant, 1.0) for tenant in by_need]
    rest = [*accumulate(reversed(own))][::-1]  # added up, not taken off: no rounding may leave 0
    for tenant, weight, whole in zip(by_need, own, rest, strict=True):
        shares[tenant] = min(wants[tenant], int(room * weight / whole))
        room -= shares[tenant]
    return shares
