"""The control loop of math.md section 5: windows in, decisions and a policy out, by the caller's clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gammaray.config import Tenant
from gammaray.errors import InvalidRequest
from gammaray.routing.audit import Decision, Target
from gammaray.routing.book import Book, Cls, Fleet
from gammaray.routing.evidence import Evidence, Rows
from gammaray.routing.facts import Columns
from gammaray.routing.fleets import Fleets, Pooled
from gammaray.routing.gallery import Gallery
from gammaray.routing.orders import Order
from gammaray.routing.overview import heat, overview
from gammaray.routing.policy import NODE_CAP, Publisher
from gammaray.routing.rules import decide
from gammaray.routing.screen import adapting, falling, screen
from gammaray.routing.settings import classes, drafter_of, drafters
from gammaray.routing.sight import look
from gammaray.routing.states import Action, Facts, GlobalMemory, Level, Limits, TenantMemory, Unit
from gammaray.routing.targets import targets
from gammaray.routing.units import Units
from gammaray.routing.window import Window
from gammaray.types import WARMUP_CLASS, Key, PolicySnapshot

GLOBAL = Limits("global", "*")
MOVES = 2000  # of rule 7 in one tick
EVERYTHING: Target = (None, None, None)
NO_MEMORY: Mapping[str, TenantMemory] = {}


class Control:
    """One thread uses it. What `memory` and `switch` give restores all decisions in another one."""

    def __init__(
        self,
        tenants: Mapping[str, Tenant],
        methods: Mapping[str, str],
        interval_s: float = 5.0,
        memory: Mapping[str, TenantMemory] = NO_MEMORY,
        switch: GlobalMemory | None = None,
        now: float = 0.0,
    ) -> None:
        """`methods` of all drafters. `memory`, `switch`: of the controller before; its policy is older."""
        self._book, self._evidence, self._fleets = Book(tenants, methods), Evidence(interval_s), Fleets()
        self._gallery = Gallery(interval_s)
        self._publisher = Publisher(switch.version + 1 if switch else 0)
        self._global = switch.unit if switch else Unit(born=now)
        self._numbers: dict[str, int] = {}  # of the last window of each source
        self._pooled: Mapping[Fleet, Pooled] = {}
        self._next_move = 0  # the row that rule 7 begins with, when it has too many
        self._down: set[Fleet] = set()  # fleets without a healthy worker
        self._running = 0  # sequences of the busiest replica
        self._changed: set[str] = set(tenants)  # tenants whose policy may be another now
        self._reshaped: set[Key] = set()  # keys that only have other ceilings
        self._dirty: set[str] = set()
        self._decisions: list[Decision] = []
        self._later: list[tuple[Key, Action, str]] = []  # orders that a class's switch means for its keys
        self._now = now
        for name, remembered in memory.items():
            if name in tenants:
                self._book.recall(name, remembered, now)
        self._add_candidates(tenants)
        self._settle()

    @property
    def policy(self) -> PolicySnapshot:
        """What holds now."""
        return self._publisher.policy

    @property
    def switch(self) -> GlobalMemory:
        """To be kept, like `memory`."""
        return GlobalMemory(self._global, self.policy.version)

    def memory(self) -> dict[str, TenantMemory]:
        """By tenant, of those that have units."""
        return {name: self._book.memory(name) for name in self._book.tenant.at}

    def remembered(self, tenant: str) -> TenantMemory | None:
        """What `memory` has of one."""
        return self._book.memory(tenant) if tenant in self._book.tenant.at else None

    def dirty(self) -> set[str]:
        """Tenants whose memory changed since this was asked last, also those that went."""
        dirty, self._dirty = self._dirty, set()
        return dirty

    def fold(self, window: Window) -> None:
        """Adds what a replica saw; the same window twice counts once."""
        if window.number <= self._numbers.get(window.source, 0):
            return
        self._numbers[window.source] = window.number
        at, book = self._book.keys.at, self._book
        for key in window.keys:
            if key not in at and book.knows(key):
                self._add(key)
        rows = np.array([at.get(key, -1) for key in window.keys], np.intp)
        known = rows >= 0
        self._evidence.reserve(len(book.keys))
        self._evidence.add(rows[known], window.counts[known])
        self._fleets.fold(window)
        here = tuple(ended for ended in window.finished if ended.tenant in book.tenants)
        self._gallery.fold(replace(window, finished=here))

    def tick(self, now: float) -> tuple[Decision, ...]:
        """Decides from all windows since the last tick. `policy` is new if anything changed."""
        self._now = now
        self._pooled = self._fleets.close(now)
        touched = self._evidence.close(self._excused())
        self._gallery.close(now, self._evidence, touched)
        self._note_fleets()
        self._judge(touched)
        self._resize()
        return self._settle()

    def act(self, order: Order, now: float) -> tuple[Decision, ...]:
        """Carries out an order at once.

        Raises NotFound for a tenant, class or drafter that there is not, InvalidRequest for an order that
        is not for such a unit.
        """
        self._now = now
        if (order.tenant, order.request_class, order.drafter) == EVERYTHING:
            self._switch_all(order)
        else:
            self._changed.add(order.tenant or "")
            for level, place in list(targets(self._book, order, self._now)):
                known = self._circumstances(place) if level == "key" else {}
                self._apply(level, place, Facts(action=order.action, note=order.reason, **known))
        return self._settle()

    def employ(
        self, tenants: Mapping[str, Tenant], methods: Mapping[str, str], now: float
    ) -> tuple[Decision, ...]:
        """Another configuration: units of what it lacks are dropped, all others keep their state."""
        self._now = now
        book, before = self._book, self._book.tenants
        changed = {name for name in before.keys() | tenants.keys() if before.get(name) != tenants.get(name)}
        for key in [key for key in book.keys.at if not _has(tenants, methods, *key)]:
            self._evidence.forget(book.drop_key(key))
            changed.add(key[0])
        for cls in [cls for cls in book.classes.at if not _has(tenants, methods, *cls, None)]:
            book.drop_class(cls)
        for name in book.tenant.at.keys() - tenants.keys():
            book.tenant.remove(book.tenant.at[name])
        self._gallery.forget(before.keys() - tenants.keys())
        if methods != book.methods:
            changed |= tenants.keys()
        book.tenants, book.methods = tenants, methods
        for name in changed & book.tenant.at.keys():
            book.configure(name)
            self._forget_switches(name)
        self._add_candidates(changed & tenants.keys())
        self._changed |= changed
        self._dirty |= changed
        return self._settle()

    def overview(self, now: float, limit: int = 200) -> dict[str, Any]:
        """For people: JSON-able, of at most `limit` tenants, the busiest first."""
        return overview(self._book, self._evidence, self._gallery, self.policy, now, limit)

    def suggestion(self, tenant: str) -> dict[str, Any] | None:
        """A split of a class, if the tenant's acceptance hangs on the length of prompts."""
        found = heat(tenant, self._gallery)
        suggestion: dict[str, Any] | None = found and found["suggestion"]
        return suggestion

    def _add(self, key: Key) -> None:
        self._book.add_key(key, self._now)
        self._dirty.add(key[0])
        if not self._publisher.tells(self._book, key, self._down, self._running):
            self._changed.add(key[0])

    def _add_candidates(self, tenants: Collection[str]) -> None:
        """Routers must hear of their share before anybody has seen them."""
        for tenant in tenants:
            for key in self._book.candidates(tenant):
                if key not in self._book.keys.at:
                    self._add(key)

    def _excused(self) -> Rows:
        book, troubled = self._book, self._fleets.troubled
        rows = [row for fleet in troubled for row in book.fleets.get(fleet, ())]
        return np.array(rows, np.intp)

    def _note_fleets(self) -> None:
        down = {fleet for fleet, pooled in self._pooled.items() if not pooled.workers}
        self._changed |= {tenant for tenant, _ in down ^ self._down if tenant in self._book.tenants}
        self._down = down

    def _judge(self, touched: Rows) -> None:
        """From above: below a level that is not ON, or has just become it, nothing is known."""
        book, now = self._book, self._now
        sight = look(book, self._evidence, touched, now)
        falls = set(falling(book.classes, sight["class"]).tolist())
        self._decide("tenant", sight["tenant"], lambda place: {"falling": place in falls})
        steady = _steady(book.tenant, now)[book.classes.column("owner")]
        sight["class"].mask(~steady)
        self._decide("class", sight["class"], self._outlook)
        steady &= _steady(book.classes, now)
        sight["key"].mask(~steady[book.keys.column("parent")])
        moving = self._in_turn(adapting(book.keys, sight["key"], now))
        self._decide("key", sight["key"], self._circumstances, {*self._of_fleets(), *moving})
        for key, action, note in self._later:
            self._apply("key", book.add_key(key, now), Facts(action=action, note=note))
        self._later.clear()

    def _decide(
        self,
        level: Level,
        columns: Columns,
        extra: Callable[[int], dict[str, Any]],
        places: Collection[int] = (),
    ) -> None:
        """Of those that may change, and of `places`. `extra`: what columns do not tell."""
        may = sorted({*screen(level, self._book.level(level), columns, self._now).tolist(), *places})
        for place, numbers in zip(may, columns.rows(may), strict=True):
            self._apply(level, place, Facts(**numbers, **extra(place)))

    def _in_turn(self, rows: Rows) -> list[int]:
        """So many that a tick stays short, even when all tenants want another depth at once."""
        if len(rows) <= MOVES:
            return list(map(int, rows))
        first = int(np.searchsorted(rows, self._next_move))
        chosen = np.roll(rows, -first)[:MOVES]
        self._next_move = int(chosen[-1]) + 1
        return list(map(int, chosen))

    def _outlook(self, place: int) -> dict[str, Any]:
        return asdict(self._book.outlook(self._book.classes.id(place), self._down))

    def _circumstances(self, place: int) -> dict[str, Any]:
        """Of a key: its pool, and whether it is on trial."""
        tenant, _, drafter = self._book.key(place)
        pooled = self._pooled.get((tenant, drafter or ""))
        known = {"workers": pooled.workers, "incidents": pooled.incidents} if pooled else {}
        return known | {name: bool(self._book.keys.column(name)[place]) for name in ("candidate", "aside")}

    def _of_fleets(self) -> set[int]:
        """Keys whose pool has news, or had no healthy worker when last seen."""
        book = self._book
        news = [fleet for fleet, pooled in self._pooled.items() if pooled.incidents or not pooled.workers]
        sick = book.keys.column("used") & ~book.keys.column("healthy")
        return {
            *np.flatnonzero(sick).tolist(),
            *(row for fleet in news for row in book.fleets.get(fleet, ())),
        }

    def _apply(self, level: Level, place: int, facts: Facts) -> None:
        units = self._book.level(level)
        old, limits = units.all[place], units.limits[place]
        new, rule = decide(old, facts, limits, self._now)
        if new is old:
            return
        units.put(place, new)
        id = units.id(place)
        key: Target = (id, None, None) if level == "tenant" else (*id, None)[:3]
        self._dirty.add(key[0] or "")
        if new.decided == old.decided:
            return
        self._decisions.append(Decision(self._now, key, level, old, new, facts, limits, rule))
        if (new.state, new.since) == (old.state, old.since):
            self._reshaped.add(id)
        else:
            self._changed.add(key[0] or "")
            self._evidence.reserve(len(self._book.keys))
            self._evidence.clear(np.array(self._book.rows(level, place), np.intp))
        if level == "class" and new.drafter != old.drafter:
            self._switch((key[0] or "", key[1] or ""), old, new, rule)

    def _switch(self, cls: Cls, old: Unit, new: Unit, rule: str) -> None:
        """What it means for the drafters: who failed falls, who is tried is probed."""
        configured = drafter_of(self._book.tenants[cls[0]], cls[1])
        before, after = old.drafter or configured, new.drafter or configured
        if rule == "low_acceptance":
            self._later.append(((*cls, before), "fall", new.reason))
        if rule in ("low_acceptance", "switch"):
            self._later.append(((*cls, after), "probe", new.reason))

    def _switch_all(self, order: Order) -> None:
        """The kill switch."""
        if order.action not in ("pin_off", "unpin"):
            raise InvalidRequest(f"{order.action} needs a tenant: name one", param="tenant")
        old, facts = self._global, Facts(action=order.action, note=order.reason)
        self._global, rule = decide(old, facts, GLOBAL, self._now)
        if self._global is not old:
            target = (None, None, None)
            self._decisions.append(
                Decision(self._now, target, "global", old, self._global, facts, GLOBAL, rule)
            )

    def _forget_switches(self, tenant: str) -> None:
        """Of classes to a drafter that is no longer configured."""
        book, named = self._book, drafters(self._book.tenants[tenant])
        for cls in book.classes_of(tenant):
            if book.classes.of(cls).drafter not in (None, *named):
                facts = Facts(action="reset", note="the drafter in use is no longer configured")
                self._apply("class", book.classes.at[cls], facts)

    def _resize(self) -> None:
        """Trees of busy replicas are narrower."""
        before, self._running = self._running, self._gallery.running
        allowed = [NODE_CAP // max(1, running) for running in (before, self._running)]
        if allowed[0] == allowed[1]:
            return
        keys = self._book.keys
        wide = keys.column("used") & (keys.column("widest") > min(allowed)) & (keys.column("widest") > 1)
        owners = np.unique(keys.column("owner")[wide]).tolist()
        self._changed |= {self._book.tenant.id(owner) for owner in owners}

    def _settle(self) -> tuple[Decision, ...]:
        """Makes public what was decided."""
        self._evidence.reserve(len(self._book.keys))
        for tenant in self._changed:
            if tenant in self._book.tenants:
                self._book.look(tenant, self._down)
        on = self._global.state != "pinned_off"
        shapes = self._changed, self._reshaped
        self._publisher.publish(self._book, *shapes, self._down, self._running, on)
        decisions, self._decisions = tuple(self._decisions), []
        self._changed.clear()
        self._reshaped.clear()
        self._gallery.note(decisions)
        return decisions


def _steady(units: Units[Any], now: float) -> NDArray[np.bool_]:
    steady: NDArray[np.bool_] = units.within(["on"]) & (units.column("since") != now)
    return steady


def _has(
    tenants: Mapping[str, Tenant], methods: Mapping[str, str], tenant: str, name: str, drafter: str | None
) -> bool:
    known = tenant in tenants and name in (*classes(tenants[tenant]), WARMUP_CLASS)
    return known and (drafter is None or drafter in methods)
