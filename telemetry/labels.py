"""Which tenants metrics tell apart, so that ten thousand of them do not make a million series."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gammaray.telemetry.names import NO_DRAFTER, OTHER

KeyLabels = tuple[str, str, str, str, str]  # values of names.KEY


class Names:
    """The first `limit` names stay, the rest is `other`. None changes sides, or counters would jump."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def admits(self, name: str) -> bool:
        if name in self._known:
            return True
        if len(self._known) >= self._limit:
            return False
        self._known.add(name)
        return True

    def of(self, name: str) -> str:
        return name if self.admits(name) else OTHER

    def keep(self, names: Collection[str]) -> None:
        """Forgets all but these; for gauges, which may come and go."""
        self._known.intersection_update(names)


class Labels:
    """Attribute values of keys. Classes and drafters of the tenants that are `other` are `other` too."""

    def __init__(self, limit: int, regions: Mapping[str, str | None] | None = None) -> None:
        """`limit`: tenants told apart; `regions`: of those that have one."""
        self.tenants = Names(limit)
        self._regions = regions or {}

    def key(self, tenant: str, request_class: str, drafter: str | None, state: str) -> KeyLabels:
        if not self.tenants.admits(tenant):
            return OTHER, OTHER, OTHER, state, OTHER
        return tenant, request_class, drafter or NO_DRAFTER, state, self._regions.get(tenant) or ""
