"""All units of a controller: which there are, and how they hang together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gammaray.config import Tenant
from gammaray.routing import settings
from gammaray.routing.exits import begin
from gammaray.routing.states import SERVING, Facts, Level, Limits, TenantMemory, Unit
from gammaray.routing.units import Units
from gammaray.types import WARMUP_CLASS, Key

Cls = tuple[str, str]  # tenant, class
Fleet = tuple[str, str]  # tenant, drafter
USABLE = (*SERVING, "warmup", "ramp", "probe")  # a class may be switched to a key in these


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a class sees of its keys; see states.Facts."""

    contracted: bool
    broken: bool
    other: str | None
    ready: str | None


class Book:
    """A key's place in `keys` is its row of the evidence.

    Keys that decode plainly and those of synthetic requests have places too, but no rule is for them.
    """

    def __init__(self, tenants: Mapping[str, Tenant], methods: Mapping[str, str]) -> None:
        self.tenants, self.methods = tenants, methods
        self.tenant: Units[str] = Units()
        self.classes: Units[Cls] = Units()
        self.keys: Units[Key] = Units()
        self.fleets: dict[Fleet, list[int]] = defaultdict(list)  # keys that rules are for
        self._rows: dict[Cls, list[int]] = defaultdict(list)

    def level(self, level: Level) -> Units[Any]:
        levels: dict[str, Units[Any]] = {"tenant": self.tenant, "class": self.classes, "key": self.keys}
        return levels[level]

    def knows(self, key: Key) -> bool:
        """Whether there may be such a key: what was removed lives on in requests for a while."""
        tenant, request_class, drafter = key
        if tenant not in self.tenants or not (drafter is None or drafter in self.methods):
            return False
        return request_class in self.class_names(tenant)

    def class_names(self, tenant: str) -> list[str]:
        """Those configured, and the one of synthetic requests."""
        return [*settings.classes(self.tenants[tenant]), WARMUP_CLASS]

    def possible(self, tenant: str) -> Iterator[Key]:
        """Keys that were seen, and those that a router may come upon."""
        named = settings.drafters(self.tenants[tenant])
        for name in self.class_names(tenant):
            seen = [self.key(row)[2] for row in self._rows.get((tenant, name), ())]
            for drafter in dict.fromkeys([*named, *seen]):
                if drafter is not None:
                    yield tenant, name, drafter

    def add_tenant(self, name: str, now: float, unit: Unit | None = None) -> int:
        if name not in self.tenant.at:
            limits = settings.tenant_limits(name, self.tenants[name])
            self.tenant.add(name, unit or Unit(born=now, since=now), limits)
        return self.tenant.at[name]

    def add_class(self, cls: Cls, now: float, unit: Unit | None = None) -> int:
        if cls not in self.classes.at:
            owner = self.add_tenant(cls[0], now)
            self.classes.add(cls, unit or Unit(born=now, since=now), self._class_limits(cls), owner, owner)
        return self.classes.at[cls]

    def add_key(self, key: Key, now: float, unit: Unit | None = None) -> int:
        """The first state of one that was just seen depends on its drafter."""
        if key in self.keys.at:
            return self.keys.at[key]
        tenant, request_class, drafter = key
        parent = self.add_class((tenant, request_class), now)
        judged = drafter is not None and request_class != WARMUP_CLASS
        limits, candidate = self._key_limits(key), self._is_candidate(key)
        if unit is None:
            unit = Unit(born=now, since=now)
            unit = begin(unit, Facts(candidate=candidate), limits, now, "seen first") if judged else unit
        place = self.keys.add(key, unit, limits, parent, self.tenant.at[tenant])
        self.keys.flag(place, "used", judged)
        self.keys.flag(place, "candidate", candidate)
        self.keys.flag(place, "aside", drafter != self.drafter((tenant, request_class)))
        self._rows[tenant, request_class].append(place)
        if judged:
            self.fleets[tenant, drafter or ""].append(place)
        return place

    def drop_key(self, key: Key) -> int:
        """Its row, which is free now."""
        tenant, request_class, drafter = key
        place = self.keys.at[key]
        self._rows[tenant, request_class].remove(place)
        if self.keys.column("used")[place]:
            self.fleets[tenant, drafter or ""].remove(place)
        self.keys.remove(place)
        return place

    def drop_class(self, cls: Cls) -> None:
        """One without keys."""
        self._rows.pop(cls, None)
        self.classes.remove(self.classes.at[cls])

    def configure(self, tenant: str) -> None:
        """Its limits, after its configuration changed."""
        self.tenant.configure(self.tenant.at[tenant], settings.tenant_limits(tenant, self.tenants[tenant]))
        for cls in self.classes_of(tenant):
            self.classes.configure(self.classes.at[cls], self._class_limits(cls))
            for row in self.rows("class", self.classes.at[cls]):
                self.keys.configure(row, self._key_limits(self.key(row)))

    def _class_limits(self, cls: Cls) -> Limits:
        return settings.class_limits(cls[0], self.tenants[cls[0]], cls[1])

    def _key_limits(self, key: Key) -> Limits:
        tenant, request_class, drafter = key
        return settings.key_limits(tenant, self.tenants[tenant], request_class, drafter or "", self.methods)

    def classes_of(self, tenant: str) -> list[Cls]:
        """Those that were seen."""
        names = self.class_names(tenant)
        return [(tenant, name) for name in names if (tenant, name) in self.classes.at]

    def rows(self, level: Level, place: int) -> list[int]:
        """Keys below a unit, or itself."""
        if level == "key":
            return [place]
        if level == "class":
            return self._rows[self.classes.id(place)]
        classes = self.classes_of(self.tenant.id(place))
        return [row for cls in classes for row in self._rows[cls]]

    def limits(self, key: Key) -> Limits:
        """Also of a key that nobody has seen."""
        place = self.keys.at.get(key)
        return self._key_limits(key) if place is None else self.keys.limits[place]

    def key(self, row: int) -> Key:
        return self.keys.id(row)

    def drafter(self, cls: Cls) -> str | None:
        """In use now."""
        switched = self.classes.of(cls).drafter
        return switched or settings.drafter_of(self.tenants[cls[0]], cls[1])

    def _is_candidate(self, key: Key) -> bool:
        tenant, request_class, drafter = key
        if drafter is None or request_class == WARMUP_CLASS:
            return False
        candidate = settings.candidate_of(self.tenants[tenant])
        return drafter == candidate and drafter != self.drafter((tenant, request_class))

    def candidates(self, tenant: str) -> list[Key]:
        """Keys on trial, seen or not."""
        drafter = settings.candidate_of(self.tenants[tenant])
        keys = [(tenant, name, drafter) for name in self.class_names(tenant)]
        return [key for key in keys if self._is_candidate(key)]

    def outlook(self, cls: Cls, down: Collection[Fleet]) -> Outlook:
        """What a class sees of its keys. `down`: fleets without a healthy worker."""
        tenant, name = cls
        own, used = self.tenants[tenant], self.drafter(cls)
        unit = self.keys.of((tenant, name, used))
        keeps = unit.until is None and not own.speculation.quality_gate.rollback_on_violation
        named = [drafter for drafter in settings.alternatives(own, name) if drafter != used]
        usable = [
            drafter
            for drafter in named
            if (tenant, drafter) not in down and self.keys.of((tenant, name, drafter)).state in USABLE
        ]
        return Outlook(
            contracted=unit.state == "contract",
            broken=used is not None and unit.state == "off" and not keeps,
            other=next(iter(usable), None),
            ready=self._ready(cls, used),
        )

    def _ready(self, cls: Cls, used: str | None) -> str | None:
        """Who waits to be used: the candidate, or the configured drafter, which failed and has recovered."""
        own = self.tenants[cls[0]]
        candidate = settings.candidate_of(own)
        wanted = candidate if used != candidate else None
        for drafter in (wanted, settings.drafter_of(own, cls[1]) if used != candidate else None):
            key = (*cls, drafter)
            if drafter not in (None, used) and key in self.keys.at and self.keys.of(key).state == "on":
                return drafter
        return None

    def look(self, tenant: str, down: Collection[Fleet]) -> None:
        """Notes for `screen` how the classes of a tenant stand, after one of its units changed."""
        for cls in self.classes_of(tenant):
            place, facts = self.classes.at[cls], self.outlook(cls, down)
            eager = facts.ready is not None or (facts.broken and facts.other is not None)
            self.classes.flag(place, "contracted", facts.contracted)
            self.classes.flag(place, "eager", eager)
            for row in self._rows[cls]:
                self.keys.flag(row, "candidate", self._is_candidate(self.key(row)))
                self.keys.flag(row, "aside", self.key(row)[2] != self.drafter(cls))

    def memory(self, tenant: str) -> TenantMemory:
        keys = [self.key(row) for row in self.rows("tenant", self.tenant.at[tenant])]
        return TenantMemory(
            self.tenant.of(tenant),
            tuple((name, self.classes.of((owner, name))) for owner, name in self.classes_of(tenant)),
            tuple((name, drafter, self.keys.of((owner, name, drafter)))
                  for owner, name, drafter in keys if drafter is not None),
        )  # fmt: skip

    def recall(self, tenant: str, memory: TenantMemory, now: float) -> None:
        """What is no longer configured is forgotten."""
        self.add_tenant(tenant, now, memory.tenant)
        for name, unit in memory.classes:
            if name in self.class_names(tenant):
                self.add_class((tenant, name), now, unit)
        for name, drafter, unit in memory.keys:
            if self.knows((tenant, name, drafter)):
                self.add_key((tenant, name, drafter), now, unit)
