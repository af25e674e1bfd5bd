"""The whole control loop in simulated time: router, engine and controller, under the load of several tenants.

The controller ticks every 5 s. Windows reach it a moment before, its policy the router and the engine a
moment later, as over Ray.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace

from gammaray.config import Config
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.sim import Language, SimClock, SimDevice, StepCost
from gammaray.engine.sim_drafter import OracleDrafter, Ranks
from gammaray.routing.audit import Decision
from gammaray.routing.briefing import Briefing
from gammaray.routing.control import Control
from gammaray.routing.plan import Router
from gammaray.routing.window import Collector
from gammaray.types import (
    Asked,
    Finished,
    GenerateRequest,
    Planned,
    PolicySnapshot,
    SamplingParams,
    StepReport,
)

from .decoding import Outcome
from .tape import Letters

INTERVAL_S = 5.0
WAY_S = 0.2  # of a window to the controller, and of a policy back
LANGUAGE = Language(16, max_model_len=4096, seed=2)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests of one tenant: a Poisson process of `rate` a second."""

    tenant: str
    rate: float
    tokens: int = 100

    def times(self, until: float, seed: int) -> Iterator[float]:
        draws, now = random.Random(f"{seed} {self.tenant}"), 0.0
        while (now := now + draws.expovariate(self.rate)) < until:
            yield now


@dataclass
class Loop:
    """`run` may be called again and again; requests that arrive are those of `load`, whatever is planned."""

    config: Config
    ranks: Mapping[str, Ranks]  # by drafter
    load: tuple[Arrivals, ...]
    cost: StepCost
    level_s: float
    until: float
    speculates: bool = True
    seed: int = 0
    clock: SimClock = field(default_factory=SimClock)
    decisions: list[Decision] = field(default_factory=list)
    reports: list[tuple[float, StepReport]] = field(default_factory=list)  # with the time at their end
    outcomes: dict[str, Outcome] = field(default_factory=lambda: defaultdict(Outcome))
    finished: list[tuple[float, Finished]] = field(default_factory=list)
    planned: dict[str, Planned] = field(default_factory=dict)

    def __post_init__(self) -> None:
        drafters = {
            name: OracleDrafter(LANGUAGE, self.clock, ranks, self.level_s, self.seed)
            for name, ranks in self.ranks.items()
        }
        device = SimDevice(LANGUAGE, self.clock, self.cost, num_blocks=4096)
        options = EngineOptions(max_batch=64, token_budget=512)
        self.engine = Engine(device, Letters(), (), drafters, options, self.clock, profile=self.cost)
        self.router = Router(self.config)
        methods = {name: drafter.method for name, drafter in self.config.drafters.items()}
        self.control = Control(self.config.tenants, methods, INTERVAL_S)
        self._collector = Collector("replica")
        self._open: dict[str, AbstractContextManager[Planned]] = {}
        arrivals = [(at, a) for a in self.load for at in a.times(self.until, self.seed)]
        self._coming = sorted(arrivals, key=lambda pair: pair[0])[::-1]
        self._events: list[tuple[float, str]] = [(INTERVAL_S - WAY_S, "tell")]
        self._told: PolicySnapshot = self.control.policy
        self._number = 0

    def run(self, until: float) -> None:
        while self.clock() < until:
            self._take_arrivals()
            self._take_events()
            if self.engine.idle:
                later = [at for at, _ in self._events] + [at for at, _ in self._coming[-1:]]
                self.clock.advance_to(min([*later, until]))
            else:
                self._step()

    def _take_arrivals(self) -> None:
        while self._coming and self._coming[-1][0] <= self.clock():
            _, arrivals = self._coming.pop()
            self._number += 1
            name = f"{arrivals.tenant}-{self._number}"
            self.engine.submit(self._request(name, arrivals))

    def _request(self, name: str, arrivals: Arrivals) -> GenerateRequest:
        prompt = tuple((self._number * 5 + i * i) % LANGUAGE.vocab_size for i in range(20))
        sampling = SamplingParams(temperature=0.0, max_tokens=arrivals.tokens, ignore_eos=True)
        request = GenerateRequest(name, prompt, sampling, tenant=arrivals.tenant)
        if not self.speculates:
            return request
        opened = self.router.open(Asked(name, arrivals.tenant, prompt=prompt, temperature=0.0))
        self._open[name] = opened
        planned = self.planned[name] = opened.__enter__()
        return replace(request, plan=planned.plan, request_class=planned.request_class)

    def _take_events(self) -> None:
        """What the engine did until the window leaves counts in this tick."""
        due = [event for event in self._events if event[0] <= self.clock()]
        for event in due:
            self._events.remove(event)
            at, what = event
            if what == "tell":
                self.control.fold(self._collector.take())
                self._events += [(at + WAY_S, "tick"), (at + INTERVAL_S, "tell")]
            elif what == "tick":
                self.decisions += self.control.tick(at)
                self._told = self.control.policy
                self._events.append((at + WAY_S, "hear"))
            else:
                self.engine.apply(self._told)
                self.router.brief(Briefing(policy=self._told))

    def _step(self) -> None:
        output = self.engine.step()
        self.reports.append((self.clock(), output.report))
        self._collector.add(output.report)
        for chunk in output.chunks:
            self.outcomes[chunk.request_id].add(chunk)
        for ended in output.report.finished:
            self.finished.append((self.clock(), ended))
            with suppress(KeyError):
                self._open.pop(ended.request_id).__exit__(None, None, None)

    # What tests ask -----------------------------------------------------------------------------------

    def decided(self, tenant: str) -> list[Decision]:
        return [decision for decision in self.decisions if decision.key[0] == tenant]

    def per_token(self, tenant: str, since: float, until: float, quantile: float = 0.99) -> float:
        """Of requests that ended in between: their time per output token, s."""
        found = sorted(
            ended.per_token_s
            for at, ended in self.finished
            if ended.tenant == tenant and since <= at < until and ended.per_token_s is not None
        )
        assert len(found) > 20, "too few requests for a quantile"
        return found[int(quantile * len(found))]

    def drafting(self, tenant: str) -> list[float]:
        """When rounds of this tenant asked for drafts."""
        return [
            at
            for at, report in self.reports
            if any(part.tenant == tenant and part.drafter is not None for part in report.counts)
        ]
