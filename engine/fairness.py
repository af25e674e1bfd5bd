"""Who of the tenants is served next, and how much of what is short each gets."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class Service:
    """Virtual token counters (Sheng et al., arXiv 2401.00588): tokens that each tenant was served, by weight.

    The tenant with the least is next. One that comes back after a pause gets no credit for it.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    def enter(self, tenant: str, active: Collection[str]) -> None:
        """It has work again; `active` had some all along."""
        least = min((self._served.get(other, 0.0) for other in active), default=0.0)
        self._served[tenant] = max(self._served.get(tenant, 0.0), least)
        if not active:  # nobody to compare with: counters need not grow for ever
            self._served = {tenant: 0.0}

    def charge(self, tenant: str, tokens: int, weight: float) -> None:
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens / weight

    def order(self, tenants: Collection[str]) -> list[str]:
        """The least served first; of equals, the one that waits longest, as `tenants` has them."""
        return sorted(tenants, key=lambda tenant: self._served.get(tenant, 0.0))


def share_room(wants: Mapping[str, int], weights: Mapping[str, float], room: int) -> dict[str, int]:
    """Max-min: nobody gets more than it wants, and what it leaves goes to the others by their weights."""
    shares: dict[str, int] = {}
    by_need = sorted(wants, key=lambda tenant: wants[tenant] / weights.get(tenant, 1.0))
    weight = sum(weights.get(tenant, 1.0) for tenant in by_need)
    for tenant in by_need:
        own = weights.get(tenant, 1.0)
        shares[tenant] = min(wants[tenant], int(room * own / weight))
        room, weight = room - shares[tenant], weight - own
    return shares
