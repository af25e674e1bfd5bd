"""Trials of drafter versions, one in each class of a tenant at most: what is counted, asked for and followed.

A candidate is in the shadow; it is accepted, then Control lets it warm up and ramp up on its share of
requests; it is current once Control has switched its class to it. A rejected one that Control brings into
the shadow again, after its time off, is compared anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gammaray.routing import registry
from gammaray.routing.orders import Order
from gammaray.routing.registry import Identity, Line, Version
from gammaray.routing.states import Action
from gammaray.routing.verdict import Evidence, Verdict, judge
from gammaray.routing.window import Window
from gammaray.types import PolicySnapshot, State

Place = tuple[str, str]  # tenant, class
LIVE = ("warmup", "ramp")  # a candidate's states behind the shadow
WITHDRAWN = "its trial was withdrawn"
AGAIN = "its time off is over: it is compared anew"


@dataclass(slots=True)
class Trial:
    """The shadow beside all others of its class that speculate.

    Requests come into the shadow by a hash of their id: both sides are samples of the same traffic.
    """

    drafter: str
    shadow: Evidence = field(default_factory=Evidence)
    others: Evidence = field(default_factory=Evidence)
    verdict: Verdict | None = None

    def side(self, drafter: str) -> Evidence:
        return self.shadow if drafter == self.drafter else self.others

    def judge(self, beside_plain: bool, waited_s: float) -> Verdict:
        self.verdict = judge(self.shadow, None if beside_plain else self.others, waited_s)
        return self.verdict


class Trials:
    """`lines` has those where anything was ever tried."""

    def __init__(self, lines: Mapping[Place, Line]) -> None:
        self.lines = dict(lines)
        self.changed: set[str] = set()  # tenants whose lines changed
        self._trials: dict[Place, Trial] = {}
        self._orders: list[Order] = []

    def configure(
        self,
        place: Place,
        configured: Version,
        canary: Version | None,
        present: Collection[Identity],
        now: float,
    ) -> None:
        """What the configuration names is current, what it puts on trial a candidate; `present` can run."""
        line = self.lines.get(place)
        if line is None and (canary is None or canary.identity == configured.identity):
            return
        line = registry.configure(line or registry.begin(configured), configured, now)
        on_trial = line.candidate
        if on_trial is not None and (canary is None or canary.identity != on_trial.identity):
            line = registry.reject(line, now, WITHDRAWN)
            self._ask("reject", place, on_trial.drafter, WITHDRAWN)
        if canary is not None and not line.knows(canary):
            line = registry.propose(line, canary, now, "the configuration puts it on trial")
        self.put(place, registry.keep(line, present))

    def put(self, place: Place, line: Line) -> None:
        """A trial begins, or ends, with what the line says."""
        if line != self.lines.get(place):
            self.lines[place] = line
            self.changed.add(place[0])
        candidate = None if line.live or line.candidate is None else line.candidate.drafter
        if candidate is None:
            self._trials.pop(place, None)
        elif place not in self._trials or self._trials[place].drafter != candidate:
            self._trials[place] = Trial(candidate)

    def keep(self, tenant: str, names: Collection[str]) -> None:
        """Only these classes of the tenant are left."""
        for place in [place for place in self.lines if place[0] == tenant and place[1] not in names]:
            del self.lines[place]
            self._trials.pop(place, None)
            self.changed.add(tenant)

    def fold(self, window: Window) -> None:
        if not self._trials:
            return
        for (tenant, request_class, drafter), row in zip(window.keys, window.counts, strict=True):
            trial = self._trials.get((tenant, request_class))
            if trial is not None and drafter is not None:
                trial.side(drafter).counts += row
        for ended in window.finished:
            trial = self._trials.get((ended.tenant, ended.request_class))
            if trial is not None and ended.drafter is not None:
                trial.side(ended.drafter).add(ended)

    def tick(self, now: float, policy: PolicySnapshot) -> list[Order]:
        """Follows what Control did, and says what it shall do."""
        for place in list(self.lines):
            self._follow(place, policy, now)
        for place, trial in list(self._trials.items()):
            self._decide(place, trial, now)
        orders, self._orders = self._orders, []
        return orders

    def verdict(self, place: Place) -> Verdict | None:
        """The latest on a trial that goes on."""
        return self._trials[place].verdict if place in self._trials else None

    def _follow(self, place: Place, policy: PolicySnapshot, now: float) -> None:
        line = self.lines[place]
        if line.candidate is None:
            again = next((one for one in line.rejected if _state(place, one, policy) == "shadow"), None)
            if again is not None:
                self.put(place, registry.propose(line, again, now, AGAIN))
            return
        state = _state(place, line.candidate, policy)
        if policy.drafters.get(place) == line.candidate.drafter:
            self.put(place, registry.promote(line, now, "its class was switched to it"))
        elif line.live and state == "shadow":
            self.put(place, registry.propose(line, line.candidate, now, AGAIN))
        elif not line.live and state in LIVE:
            self.put(place, registry.accept(line, now, "the operator accepted it"))

    def _decide(self, place: Place, trial: Trial, now: float) -> None:
        line = self.lines[place]
        assert line.candidate is not None  # else there is no trial
        verdict = trial.judge(line.current.drafter is None, now - line.candidate.since)
        if verdict.outcome == "wait":
            return
        self._ask(verdict.outcome, place, trial.drafter, verdict.reason)
        end = registry.accept if verdict.outcome == "accept" else registry.reject
        self.put(place, end(line, now, verdict.reason))

    def _ask(self, action: Action, place: Place, drafter: str | None, reason: str) -> None:
        self._orders.append(Order(action, *place, drafter, reason))


def _state(place: Place, version: Version, policy: PolicySnapshot) -> State:
    return policy.of((*place, version.drafter)).state
