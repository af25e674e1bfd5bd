"""What the controller does, without Ray: windows and orders come in, policies and bulletins go out."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

import numpy as np

from gammaray.actors.journal import Journal
from gammaray.config import Config
from gammaray.routing.audit import Decision, record
from gammaray.routing.bulletin import Answer, Bulletin, Known, Origin
from gammaray.routing.control import Control
from gammaray.routing.health import HealthJob
from gammaray.routing.learning import Learner, Priors
from gammaray.routing.ledger import Ledger, day_of, end_of
from gammaray.routing.orders import Order
from gammaray.routing.registry import Version
from gammaray.routing.rollout import Rollout
from gammaray.routing.tenants import Roster, describe, expire, put
from gammaray.routing.window import Window
from gammaray.types import PolicySnapshot, State

logger = logging.getLogger(__name__)

Json = dict[str, Any]
Back = Literal["drafter", "policy"]
MEMORY, ROLLOUT, USAGE = "memory/", "rollout/", "usage/"  # by tenant; the last one by day
GLOBAL, ROSTER, VERSION = "global", "roster", "version"
MARKS, PRIORS, PREDICTOR, WEEK = "marks", "priors", "predictor", "week"
KEPT = USAGE  # what outlives the application, as long as the Ray cluster does
GONE_S = 15.0  # a replica that said nothing for so long, or for three intervals


@dataclass(frozen=True, slots=True)
class Mandate:
    """What the controller is hired for. `placement`: GPU islands and seats, as JSON."""

    config: Config
    apart: frozenset[str] = frozenset()  # see Roster
    placement: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replica:
    """As its last window told."""

    origin: Origin
    window: Window
    heard: float


@dataclass(frozen=True, slots=True)
class Week:
    """The weekly health job as it was when the last week ended, and what it found, by key."""

    state: Mapping[str, Any] | None = None
    alarms: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Published:
    """What others may hear, as it can be lost no more."""

    bulletin: Bulletin
    kept: Mapping[str, int]  # the last window of each source


class Desk:
    """`clock`: seconds, Unix. Any thread may call anything, but `tick` and `learn`, which are for one.

    Whatever changes is committed to the journal before anybody hears of it: `_settle` is the only way out.
    """

    def __init__(self, mandate: Mandate, journal: Journal, clock: Callable[[], float]) -> None:
        self.mandate, self._journal, self._clock = mandate, journal, clock
        self._lock = threading.RLock()
        self.tick_at = 0.0  # when the next tick is due
        self._decided: list[Decision] = []
        self._life, self._editions = secrets.token_hex(4), 0
        self._inbox: dict[tuple[str, int], Window] = {}
        self._replicas: dict[str, Replica] = {}
        self.roster: Roster = journal.read(ROSTER) or Roster(mandate.config, apart=mandate.apart)
        self.ledger = Ledger(journal.load(USAGE), journal.read(MARKS))
        self._priors: Priors = journal.read(PRIORS) or Priors()
        self._learner = _learner(journal)
        self._week: Week = journal.read(WEEK) or Week()
        self._health = HealthJob(clock(), self._week.state)
        self.control = Control(
            self.roster.config.tenants,
            _methods(self.roster.config),
            mandate.config.controller.interval_s,
            journal.load(MEMORY),
            journal.read(GLOBAL),
            clock(),
        )
        self.rollout = Rollout(
            self.roster.config.tenants, _versions(self.roster.config), journal.load(ROLLOUT), clock()
        )
        self._written: dict[str, object] = {ROSTER: self.roster}  # what need not be written again
        self._version: int = journal.read(VERSION) or 0  # of the policy that was told last
        self._policy: PolicySnapshot | None = None
        self._published = self._settle(())

    def tell(self, origin: Origin, windows: Sequence[Window]) -> Answer:
        """Takes windows for the next tick; says which ones need not come again."""
        with self._lock:
            for window in map(_finite, windows):
                self._inbox[window.source, window.number] = window
                self._replicas[origin.source] = Replica(origin, window, self._clock())
            published = self._published
        kept = published.kept.get(origin.source, 0)
        return Answer(published.bulletin.policy, kept, max(0.0, self.tick_at - self._clock()))

    def bulletin(self, known: Known) -> Bulletin | None:
        """Without what is known; None when that is all."""
        newest = self._published.bulletin
        if newest.edition == known.edition:
            return None
        if newest.revision == known.revision:
            newest = replace(newest, tenants=None)
        seen = newest.predictor and newest.predictor.version == known.predictor
        return replace(newest, predictor=None) if seen else newest

    def tick(self) -> tuple[Decision, ...]:
        """Folds what came, decides, keeps it, and tells."""
        with self._lock:
            now = self._clock()
            self._fold(now)
            self._check_health(now)
            self.ledger.forget(now)
            decisions = [*self._employ(expire(self.roster, now), now), *self._roll_out(now)]
            decisions += self.control.tick(now)
            self._published = self._settle(decisions)
        return tuple(decisions)

    def learn(self) -> None:
        """May take a second, in which others are served."""
        if self.mandate.config.controller.predictor and self._learner.maybe_train(self._clock()):
            with self._lock:
                self._published = self._settle(())

    def order(self, order: Order) -> tuple[Decision, ...]:
        """Carries out what an operator asks. Raises InvalidRequest or NotFound."""
        with self._lock:
            decisions = self.control.act(order, self._clock())
            self._published = self._settle(decisions)
        return decisions

    def change(self, make: Callable[[Roster, float], Roster]) -> Roster:
        """Takes the tenants that `make` gives of those that are, at a time. Raises what it raises."""
        with self._lock:
            now = self._clock()
            self._published = self._settle(self._employ(make(self.roster, now), now))
            return self.roster

    def roll_back(self, tenant: str, what: Back, request_class: str) -> tuple[Decision, ...]:
        """A class to its drafter's previous version, or the tenant to its previous draft shapes.

        Raises NotFound when there is none.
        """
        with self._lock:
            if what == "policy":
                before = self.rollout.roll_back_policy(tenant)
                self.change(lambda roster, now: put(roster, tenant, describe(before)))
                return ()
            reason = "the operator rolled it back"
            return self.order(self.rollout.roll_back_drafter(tenant, request_class, reason, self._clock()))

    def overview(self, limit: int) -> Json:
        """See docs/control.md; with the `limit` busiest tenants."""
        with self._lock:
            seen = self.control.overview(self._clock(), limit)
            replicas = [_replica(one) for one in self._alive()]
            more = {"version": self.policy.version, "replicas": replicas, "placement": self.mandate.placement}
            more["alarms"] = [{"key": key, "text": text} for key, text in self._week.alarms.items()]
            for one in seen["tenants"]:
                self._add_audited(one)
        return {**seen, **more}

    def _add_audited(self, tenant: Json) -> None:
        """Which version of each drafter is meant, and what its audits found."""
        drafters, audited = self.roster.config.drafters, self.rollout.audited
        told = {
            (tenant["tenant"], kind["class"], key["drafter"]): key
            for kind in tenant["classes"]
            for key in kind["keys"]
        }
        for key, one in told.items():
            drafter = drafters.get(one["drafter"])
            one |= {"version": drafter and drafter.version, **audited.means(key)}
        tenant["quality"] = audited.correlations(told)

    def take_decisions(self) -> list[Decision]:
        """Those since this was asked last."""
        with self._lock:
            decided, self._decided = self._decided, []
        return decided

    def state(self, tenant: str) -> State:
        with self._lock:
            memory = self.control.remembered(tenant)
        return memory.tenant.state if memory else "on"

    def suggestion(self, tenant: str) -> Json | None:
        """What the tenant's heat map suggests."""
        with self._lock:
            return self.control.suggestion(tenant)

    def records(self, limit: int) -> list[Json]:
        """The last decisions, newest first."""
        return [dict(record) for record in self._journal.records(limit)]

    @property
    def policy(self) -> PolicySnapshot:
        return self._published.bulletin.policy

    @property
    def today(self) -> str:
        return day_of(self._clock())

    def _fold(self, now: float) -> None:
        windows, self._inbox = self._inbox, {}
        fresh = [windows[name] for name in sorted(windows) if self.ledger.fold(windows[name], now)]
        for window in fresh:
            self.control.fold(window)
            self.rollout.fold(window)
            for ended in window.finished:
                self._priors.add(ended)
                self._learner.add(ended)
            self._health.add(window.finished)

    def _check_health(self, now: float) -> None:
        if self._health.due(now):
            alarms = {"/".join(map(str, key)): text for key, text in self._health.run(now).items()}
            for name, text in alarms.items():
                logger.warning("%s: %s", name, text)
            self._week = Week(self._health.state(), alarms)

    def _roll_out(self, now: float) -> list[Decision]:
        """What trials and audits of drafters ask for."""
        orders = self.rollout.tick(now, self.policy)
        return [decision for order in orders for decision in self.control.act(order, now)]

    def _employ(self, roster: Roster, now: float) -> tuple[Decision, ...]:
        if roster is self.roster:
            return ()
        self._priors.forget(self.roster.config.tenants.keys() - roster.config.tenants.keys())
        self.roster = roster
        self.rollout.employ(roster.config.tenants, _versions(roster.config), now)
        return self.control.employ(roster.config.tenants, _methods(roster.config), now)

    def _settle(self, decisions: Sequence[Decision]) -> Published:
        """Keeps all that changed, then gives what may be told. What cannot be kept is not told."""
        policy = self._effective()
        if policy != self._policy:
            self._version += 1
            policy = replace(policy, version=self._version)
        fresh = {name: value for name, value in self._whole().items() if self._written.get(name) != value}
        priors = {PRIORS: self._priors} if MARKS in fresh else {}
        changes = {**self._units(), **fresh, **priors}
        self._journal.commit(changes, [record(one) for one in decisions])
        self._written |= fresh
        self._policy = policy
        self._decided += decisions
        self._editions += 1
        marks = self.ledger.marks.last
        kept = {source: number for source, (number, _) in marks.items()}
        return Published(self._bulletin(policy), kept)

    def _whole(self) -> dict[str, object]:
        return {
            ROSTER: self.roster,
            GLOBAL: self.control.switch,
            VERSION: self._version,
            MARKS: self.ledger.marks,
            PREDICTOR: self._learner.predictor,
            WEEK: self._week,
        }

    def _units(self) -> dict[str, object]:
        """What changed of tenants' states and trials, and of days; None: it went."""
        states = {f"{MEMORY}{name}": self.control.remembered(name) for name in self.control.dirty()}
        here = self.roster.config.tenants
        trials = {
            f"{ROLLOUT}{name}": self.rollout.remembered(name) if name in here else None
            for name in self.rollout.dirty()
        }
        days = {f"{USAGE}{name}": self.ledger.day(name) or None for name in self.ledger.dirty()}
        return {**states, **trials, **days}

    def _effective(self) -> PolicySnapshot:
        """What was decided, and what is to be audited."""
        return replace(self.control.policy, version=self._version, audit=self.rollout.audit)

    def _bulletin(self, policy: PolicySnapshot) -> Bulletin:
        now, tenants = self._clock(), self.roster.config.tenants
        day = day_of(now)
        used = self.ledger.day(day)
        limited = (name for name, tenant in tenants.items() if tenant.limits.tokens_per_day is not None)
        return Bulletin(
            edition=f"{self._life}.{self._editions}",
            policy=policy,
            revision=self.roster.revision,
            tenants=tenants,
            day_ends=end_of(day),
            used_today={name: used[name].tokens for name in limited if name in used},
            priors=self._priors.snapshot(),
            predictor=self._learner.predictor,
            concurrency=fmean([one.window.running for one in self._alive()] or [0.0]),
        )

    def _alive(self) -> list[Replica]:
        """Forgets those that are gone."""
        oldest = self._clock() - max(GONE_S, 3 * self.mandate.config.controller.interval_s)
        self._replicas = {name: one for name, one in self._replicas.items() if one.heard >= oldest}
        return [self._replicas[name] for name in sorted(self._replicas)]


def _finite(window: Window) -> Window:
    """A count that is no number must not spoil sums for good, nor come again and again."""
    if np.isfinite(window.counts).all():
        return window
    return replace(window, counts=np.nan_to_num(window.counts, nan=0.0, posinf=0.0, neginf=0.0))


def _methods(config: Config) -> dict[str, str]:
    return {name: drafter.method for name, drafter in config.drafters.items()}


def _versions(config: Config) -> dict[str, Version]:
    return {name: Version(name, one.version, one.method) for name, one in config.drafters.items()}


def _learner(journal: Journal) -> Learner:
    """Goes on with the predictor that routers have."""
    kept = journal.read(PREDICTOR)
    learner = Learner(version=kept.version if kept else 0)
    learner.predictor = kept
    return learner


def _replica(one: Replica) -> Json:
    window = one.window
    return {
        "source": one.origin.source,
        "node": one.origin.node,
        "gpus": list(one.origin.devices),
        "running": window.running,
        "waiting": window.waiting,
        "kv_used_blocks": window.kv_used_blocks,
        "kv_total_blocks": window.kv_total_blocks,
        "links": [asdict(link) for link in window.links],
    }
