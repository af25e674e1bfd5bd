"""Trials of drafter versions, the KL gate, and the ways back of a drafter and of a policy.

A drafter goes back to its previous version, a tenant to its previous draft shapes; neither touches the other,
nor a pin (orders.py), which takes speculation itself back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gammaray.config import Tenant
from gammaray.errors import NotFound
from gammaray.routing import registry, revisions
from gammaray.routing.audited import Audited
from gammaray.routing.gate import Audit, Finding, Gate
from gammaray.routing.orders import Order
from gammaray.routing.registry import Line, Version
from gammaray.routing.revisions import Revisions
from gammaray.routing.settings import candidate_of, classes, drafter_of
from gammaray.routing.trials import Place, Trials
from gammaray.routing.verdict import Verdict
from gammaray.routing.window import Window
from gammaray.types import Key, PolicySnapshot


@dataclass(frozen=True, slots=True)
class RolloutMemory:
    """What must outlive a restart, of one tenant. What a trial or audit has counted so far begins anew."""

    lines: tuple[tuple[str, Line], ...] = ()  # by class
    audits: tuple[tuple[str, str, Audit], ...] = ()  # class, drafter
    revisions: Revisions = ()


class Rollout:
    """One thread uses it. It folds what Control folds, and its orders are for Control, before that ticks."""

    def __init__(
        self,
        tenants: Mapping[str, Tenant],
        drafters: Mapping[str, Version],
        memory: Mapping[str, RolloutMemory] | None = None,
        now: float = 0.0,
    ) -> None:
        """`drafters`: each entry of the configuration, by name. Times in seconds, all on one clock."""
        kept = memory or {}
        self.audit: frozenset[Key] = frozenset()  # for the policy, see PolicySnapshot
        self._gate = Gate()
        self._gate.audits |= {(t, c, d): audit for t, one in kept.items() for c, d, audit in one.audits}
        self._trials = Trials({(t, c): line for t, one in kept.items() for c, line in one.lines})
        self._revisions = {tenant: one.revisions for tenant, one in kept.items()}
        self._numbers: dict[str, int] = {}  # of the last window of each source
        self._orders: list[Order] = []  # for the next tick
        self._dirty: set[str] = set()
        self._tenants: Mapping[str, Tenant] = {}
        self.employ(tenants, drafters, now)

    @property
    def audited(self) -> Audited:
        """Of numbers to show."""
        return self._gate.audited

    def employ(self, tenants: Mapping[str, Tenant], drafters: Mapping[str, Version], now: float) -> None:
        """Goes on with another configuration; what follows from it is ordered at the next tick."""
        before, self._tenants, self._drafters, self._now = self._tenants, tenants, drafters, now
        self._versions = {name: version.version for name, version in drafters.items()}
        self._places = {(name, one) for name, tenant in tenants.items() for one in classes(tenant)}
        self._gate.keep(self._places)
        for name in (before.keys() | self._revisions.keys()) - tenants.keys():
            self._forget(name)
        self._present = {registry.PLAIN.identity, *(version.identity for version in drafters.values())}
        for name in [name for name, one in tenants.items() if before.get(name) is not one]:
            self._configure(name, now)
        self._release()

    def fold(self, window: Window) -> None:
        """Adds what a replica saw; the same window twice counts once."""
        if window.number <= self._numbers.get(window.source, 0):
            return
        self._numbers[window.source] = window.number
        self._trials.fold(window)
        for ended in window.finished:
            if (ended.tenant, ended.request_class) in self._places:
                self._gate.see(ended, self._versions, self._now)

    def tick(self, now: float, policy: PolicySnapshot) -> tuple[Order, ...]:
        """What is asked of Control, whose policy this is; then `audit` is new."""
        self._now = now
        orders = self._orders + self._trials.tick(now, policy)
        self._orders = []
        for key, finding in self._gate.conclude(policy, self._threshold, now):
            self._dirty.add(key[0])
            if finding.outcome == "violation":
                orders.append(self._violation(key, finding, now))
        self.audit = self._gate.due(policy, self._versions, now)
        return tuple(orders)

    def line(self, tenant: str, request_class: str) -> Line:
        """Raises NotFound for a tenant or class that there is not."""
        if (tenant, request_class) not in self._places:
            message = f"there is no class {request_class!r} of a tenant {tenant!r}"
            raise NotFound(message, param="class", code="no_class")
        place = tenant, request_class
        return self._trials.lines.get(place) or registry.begin(self._configured(place))

    def verdict(self, tenant: str, request_class: str) -> Verdict | None:
        """The latest on a trial that goes on; None: there is none."""
        return self._trials.verdict((tenant, request_class))

    def roll_back_drafter(self, tenant: str, request_class: str, reason: str, now: float) -> Order:
        """To the previous version. Raises NotFound when there is none."""
        line = self.line(tenant, request_class)
        self._trials.put((tenant, request_class), registry.roll_back(line, now, reason))
        return Order("violation", tenant, request_class, line.current.drafter, reason)

    def roll_back_policy(self, tenant: str) -> Tenant:
        """The tenant under its previous draft shapes, to be employed. Raises NotFound when there are none."""
        kept = revisions.roll_back(self._revisions.get(tenant, ()))
        self._revisions[tenant] = kept
        self._dirty.add(tenant)
        return revisions.under(self._tenants[tenant], kept[-1].parameters)

    def memory(self) -> dict[str, RolloutMemory]:
        """By tenant."""
        return {tenant: self.remembered(tenant) for tenant in self._tenants}

    def remembered(self, tenant: str) -> RolloutMemory:
        """What `memory` has of one."""
        names, lines, audits = classes(self._tenants[tenant]), self._trials.lines, self._gate.audits
        return RolloutMemory(
            tuple((name, lines[tenant, name]) for name in names if (tenant, name) in lines),
            tuple(
                (name, drafter, replace(audits[tenant, name, drafter], texts=()))
                for name in names
                for drafter in self._drafters
                if (tenant, name, drafter) in audits
            ),
            self._revisions.get(tenant, ()),
        )

    def dirty(self) -> set[str]:
        """Tenants whose memory changed since this was asked last, also those that went."""
        dirty = self._dirty | self._trials.changed
        self._dirty, self._trials.changed = set(), set()
        return dirty

    def _configured(self, place: Place) -> Version:
        drafter = drafter_of(self._tenants[place[0]], place[1])
        return registry.PLAIN if drafter is None else self._drafters[drafter]

    def _configure(self, name: str, now: float) -> None:
        tenant = self._tenants[name]
        names, canary = classes(tenant), candidate_of(tenant)
        on_trial = None if canary is None else self._drafters[canary]
        self._trials.keep(name, names)
        for one in names:
            configured = self._configured((name, one))
            self._trials.configure((name, one), configured, on_trial, self._present, now)
        self._note_policy(name, now)

    def _note_policy(self, name: str, now: float) -> None:
        """A first revision is what is configured: it need not be kept before there is a second."""
        kept = self._revisions.get(name, ())
        noted = revisions.note(kept, revisions.parameters(self._tenants[name]), now)
        if noted is not kept:
            self._revisions[name] = noted
            self._dirty |= {name} if len(noted) > 1 else set()

    def _forget(self, name: str) -> None:
        self._revisions.pop(name, None)
        self._trials.keep(name, ())
        self._dirty.add(name)

    def _release(self) -> None:
        """Rule 1 holds until there is a new version of the drafter."""
        for key, audit in list(self._gate.audits.items()):
            version = self._versions.get(key[2] or "")
            if audit.violated and version not in (None, audit.version):
                self._gate.audits[key] = Audit(audit.version)
                self._orders.append(Order("reset", *key, f"{key[2]} has a new version, {version}"))

    def _threshold(self, key: Key) -> float:
        return self._tenants[key[0]].speculation.quality_gate.kl_threshold

    def _violation(self, key: Key, finding: Finding, now: float) -> Order:
        """The key's drafter goes back to its previous version, or ends its trial."""
        tenant, request_class, drafter = key
        place, quality_gate = (tenant, request_class), self._tenants[tenant].speculation.quality_gate
        line = self.line(tenant, request_class)
        if line.candidate is not None and line.candidate.drafter == drafter:
            self._trials.put(place, registry.reject(line, now, finding.reason))
        elif line.current.drafter == drafter and line.previous and quality_gate.rollback_on_violation:
            self._trials.put(place, registry.roll_back(line, now, finding.reason))
        return Order("violation", *key, finding.reason)
