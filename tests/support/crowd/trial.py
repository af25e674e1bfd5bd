"""The whole: traffic, plans, rounds, windows, and a controller whose work is timed."""

from __future__ import annotations

import pickle
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from gammaray.routing.briefing import Briefing
from gammaray.routing.control import Control
from gammaray.routing.learning import Learner, Priors
from gammaray.routing.window import Window

from .arms import Arms
from .costs import Costs, Floats, Ints
from .plans import CLASS, DRAFTER, TENANT, Crowd, Plans, Router, deepest
from .rounds import Served, Texts, serve, serve_one
from .traffic import COLLAPSING, INTERVAL_S, Requests, Traffic
from .windows import Tick, windows

COSTS = Costs()


@dataclass(frozen=True, slots=True)
class Setup:
    """`sampled`: tenants whose requests are planned and broken by the product's own code."""

    tenants: int = 10_000
    replicas: int = 100
    ticks: int = 60
    sampled: int = 100
    predictor: bool = True
    misled: float = 0.02
    collapsing: float = COLLAPSING
    seed: int = 0
    costs: Costs = COSTS


@dataclass
class Times:
    """Seconds of CPU and of the clock, by part of a tick, one of each tick."""

    cpu: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    wall: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.cpu[part].append(time.process_time() - cpu)
        self.wall[part].append(time.perf_counter() - wall)


class Trial:
    """`run` once."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.names = [f"tenant-{i}" for i in range(setup.tenants)]
        self.arms, self.times = Arms(setup.costs), Times()
        self.rules: Counter[str] = Counter()
        self.states: Counter[str] = Counter()  # of keys in the policy, summed over the ticks
        self.requests = self.rows = self.ended = self.predictors = 0
        self.snapshot_bytes = self.window_bytes = 0  # the largest, and of all windows of a tick
        self._traffic = Traffic(
            setup.tenants, setup.replicas, setup.ticks, setup.misled, setup.seed, setup.collapsing
        )
        self._crowd = Crowd(self.names, self._traffic.prompts, setup.seed + 1)
        self._router = Router(self._traffic.prompts)
        self.control = Control(dict.fromkeys(self.names, TENANT), {DRAFTER: "ngram"}, INTERVAL_S)
        self._priors, self._learner = Priors(), Learner()
        step = max(1, setup.tenants // setup.sampled)
        self._is_sampled = np.arange(setup.tenants) % step == 0
        self.sampled = int(self._is_sampled.sum())

    def run(self) -> None:
        for number in range(self.setup.ticks):
            told = self._serve(number)
            self._control(told, INTERVAL_S * (number + 1))

    def _serve(self, number: int) -> list[Window]:
        """What the replicas do in a tick, under the policy of the last one."""
        requests = self._traffic.tick(number)
        batches = self._traffic.batches(requests, self.setup.costs)
        batch = batches[requests.replica]
        texts, briefing = self._texts(requests, batch), self._briefing(batches)
        plans = self._crowd.plan(requests, briefing, texts)
        sampled = np.flatnonzero(self._is_sampled[requests.tenant])
        self._plan_sampled(sampled, requests, texts, briefing, plans, INTERVAL_S * number)
        served = serve(texts, plans.deepest, adaptive=True)
        self._serve_sampled(sampled, texts, plans, served)
        self.arms.add(
            _part(texts, sampled), _part_served(served, sampled), requests.alpha[sampled], batch[sampled]
        )
        self.requests += len(batch)
        tick = Tick(
            number, requests, plans.forecasts, (plans.deepest > 0).astype(np.int64), texts, served, batches
        )
        return list(windows(tick, self.names, self.setup.costs))

    def _texts(self, requests: Requests, batch: Floats) -> Texts:
        """The cost of a round is that which the engine tells: of the whole step, and of all that the key
        drafts in it."""
        costs = self.setup.costs
        place = requests.replica * self.setup.tenants + requests.tenant
        of_key, of_all = np.bincount(place, requests.tokens), np.bincount(requests.replica, requests.tokens)
        own = np.maximum(1.0, batch * of_key[place] / of_all[requests.replica])
        return Texts(requests.run, requests.tokens, costs.step_s(batch), own * costs.node_s(batch))

    def _briefing(self, batches: Floats) -> Briefing:
        return Briefing(
            policy=self.control.policy,
            priors=self._priors.snapshot(),
            predictor=self._learner.predictor,
            concurrency=float(batches.mean()),
        )

    def _plan_sampled(
        self,
        sampled: Ints,
        requests: Requests,
        texts: Texts,
        briefing: Briefing,
        plans: Plans,
        began: float,
    ) -> None:
        for i in sampled.tolist():
            name, at = self.names[requests.tenant[i]], began + float(requests.at[i])
            open_s = float(texts.tokens[i] * texts.base_s[i])
            planned = self._router.plan(name, int(requests.prompt[i]), at, open_s, briefing)
            plans.deepest[i] = deepest(planned, name, briefing)
            plans.forecasts[i] = planned.forecast

    def _serve_sampled(self, sampled: Ints, texts: Texts, plans: Plans, served: Served) -> None:
        for counts in (served.plain, served.drafted, served.tests, served.hits):
            counts[sampled] = 0
        for i in sampled.tolist():
            serve_one(served, i, texts, int(plans.deepest[i]))

    def _control(self, told: list[Window], now: float) -> None:
        sent = [pickle.dumps(window, pickle.HIGHEST_PROTOCOL) for window in told]
        self.window_bytes = max(self.window_bytes, sum(map(len, sent)))
        self.rows += sum(len(window.keys) for window in told)
        self.ended += sum(len(window.finished) for window in told)
        told.clear()
        with self.times.of("unpickle the windows"):
            told = [pickle.loads(one) for one in sent]
        with self.times.of("fold and tick"):
            with self.times.of("fold"):
                for window in told:
                    self.control.fold(window)
            with self.times.of("tick"):
                decisions = self.control.tick(now)
        with self.times.of("learn"):
            self._learn(told, now)
        with self.times.of("pickle the policy"):
            snapshot = pickle.dumps(self.control.policy, pickle.HIGHEST_PROTOCOL)
        self.snapshot_bytes = max(self.snapshot_bytes, len(snapshot))
        self.rules.update(decision.rule for decision in decisions)
        policies = self.control.policy.keys.items()
        self.states.update(policy.state for one, policy in policies if one[1] == CLASS)

    def _learn(self, told: list[Window], now: float) -> None:
        for window in told:
            for ended in window.finished:
                self._priors.add(ended)
                if self.setup.predictor:
                    self._learner.add(ended)
        if self.setup.predictor and self._learner.maybe_train(now) is not None:
            self.predictors += 1


def _part(texts: Texts, which: Ints) -> Texts:
    return Texts(texts.run[which], texts.tokens[which], texts.base_s[which], texts.node_s[which])


def _part_served(served: Served, which: Ints) -> Served:
    by_length = served.tests[which], served.hits[which]
    return Served(served.plain[which], served.drafted[which], *by_length, served.broke[which])
