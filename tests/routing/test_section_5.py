"""math.md section 5 once more, for one tenant with one class and one drafter: as it is written there, with
lists and loops, beside the control loop that is built to be fast. What the page leaves open is marked."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from support.windows import Traffic, row, window

from gammaray.config import Tenant
from gammaray.routing.control import Control
from gammaray.routing.depth import best_gamma
from gammaray.routing.states import Unit
from gammaray.routing.window import CAUSES, COLUMN, Counts
from gammaray.types import Key

KEY: Key = ("bank", "default", "a")
TICK_S, NAN = 5.0, math.nan


@dataclass
class State:
    name: str = "on"
    since: float = 0.0
    until: float | None = None
    share: float = 1.0
    delay: float = 0.0
    settled: float = -math.inf
    gamma: int = 16
    epoch: int = 0
    low: int = 0
    slow: int = 0
    clean: int = 0


@dataclass
class Seen:
    alpha: float = NAN
    s_low: float = NAN
    s_high: float = NAN
    fr: float = NAN
    tested: float = 0.0
    probe_low: float = NAN
    probe_fr: float = NAN


NOTHING = Seen()


def enough(ticks: list[Counts], name: str, least: int) -> Counts | None:
    """Alpha needs 200 tested tokens and FR 20 requests: else the window grows to 60 s, or the state holds."""
    total = np.zeros_like(ticks[-1])
    if ticks[-1][COLUMN[name]] == 0:  # open: a tick without anything new holds too
        return None
    for counts in ticks[: -13 if len(ticks) > 12 else None : -1]:
        total = total + counts
        if total[COLUMN[name]] >= least:
            return total
    return None


def fallback_rate(counts: Counts) -> float:
    planned = counts[COLUMN["planned"]]
    return float(sum(counts[COLUMN[cause]] for cause in CAUSES) / planned) if planned else NAN


def see(ticks: list[Counts], most: int) -> Seen:
    seen, total = Seen(), np.sum(ticks, axis=0)
    seen.tested, seen.probe_fr = float(total[COLUMN["tested"]]), fallback_rate(total)
    seen.probe_fr = seen.probe_fr if total[COLUMN["planned"]] >= 20 else NAN
    seen.probe_low = float(best_gamma(total[None], min(most, 8))[2][0])
    if (requests := enough(ticks, "planned", 20)) is not None:
        seen.fr = fallback_rate(requests)
    if (counts := enough(ticks, "tested", 200)) is not None:
        rounds, emitted, squares, base, extra, tested, first = (
            float(counts[COLUMN[name]])
            for name in (
                "rounds",
                "emitted",
                "emitted_squared",
                "base_s",
                "extra_s",
                "tested",
                "first_accepted",
            )
        )
        tau = emitted / rounds
        error = 3 * math.sqrt(max(0.0, squares - rounds * tau**2) / (rounds - 1) / rounds)
        seen.alpha = first / tested
        seen.s_low, seen.s_high = ((tau + sign * error) * base / (base + extra) for sign in (-1, 1))
    return seen


class Page:
    """What the page says of each level."""

    def __init__(self, gamma: int, adaptive: bool, now: float) -> None:
        self.tenant, self.request_class, self.key = State(since=now), State(since=now), State(since=now)
        self.most, self.adaptive, self.now = gamma, adaptive, now
        self.ticks: list[Counts] = []  # since the last transition

    def tick(self, counts: Counts, now: float) -> None:
        self.ticks.append(counts)
        self.now, self.moved = now, False
        tenant, cls, key = self.tenant, self.request_class, self.key
        seen, serving = see(self.ticks, self.most), key.name in ("on", "contract")
        tried = serving or key.name in ("ramp", "probe")
        self.decide_tenant(tenant, seen if tried else Seen(fr=seen.fr), self.falls(seen) and serving)
        if not self.is_steady(tenant):  # open: below what is not ON, time alone goes on
            self.leave(cls, NOTHING)
            self.leave(key, NOTHING)
            self.end()
            return
        self.decide_class(cls, seen if serving or (tried and cls.name != "on") else NOTHING, key)
        self.decide_key(key, seen) if self.is_steady(cls) else self.leave(key, NOTHING)
        self.end()

    def end(self) -> None:
        if self.moved:
            self.ticks = []

    def is_steady(self, state: State) -> bool:
        return state.name == "on" and state.since != self.now

    def decide_tenant(self, tenant: State, seen: Seen, class_falls: bool) -> None:
        if tenant.name == "ramp":
            self.count(tenant, seen)
        if tenant.name in ("on", "probe", "ramp") and seen.fr > 0.15:  # rule 3
            self.off(tenant)
        elif tenant.name == "on" and seen.fr > 0.10 and not class_falls:  # rule 5, after rule 4
            self.enter(tenant, "emergency", until=self.now + 30)
        else:
            self.leave(tenant, seen)

    def falls(self, seen: Seen) -> bool:
        cls = self.request_class
        steady = self.is_steady(self.tenant) and cls.name == "on"
        return steady and self.is_low(seen) and (seen.alpha < 0.20 or cls.low >= 1)

    def decide_class(self, cls: State, seen: Seen, key: State) -> None:
        self.count(cls, seen)
        if cls.name == "on" and key.name != "contract":
            cls.slow = 0
        rule_4 = self.is_low(seen) and (seen.alpha < 0.20 or cls.low >= 2)
        rule_6 = cls.slow >= 3  # still < 1 for three more ticks
        if cls.name == "on" and (rule_4 or rule_6):
            self.off(cls)
        else:
            self.leave(cls, seen)

    def decide_key(self, key: State, seen: Seen) -> None:
        self.count(key, seen)
        if key.name != "on":
            self.leave(key, seen)
        elif key.slow >= 3 or seen.fr > 0.05:  # rule 6
            gamma = self.best(key) if self.adaptive else key.gamma
            self.enter(key, "contract", gamma=gamma)
        elif self.adaptive and seen.s_low > 1.05 and not seen.fr >= 0.03:  # rule 7; open: FR may be unknown
            here, wanted = min(key.gamma, self.most), self.best(key)
            key.gamma = here + (wanted > here) - (wanted < here)

    def leave(self, state: State, seen: Seen) -> None:
        """Exits."""
        over = state.until is not None and self.now >= state.until
        passed = seen.probe_low > 1.05 and not seen.probe_fr >= 0.05
        if state.name in ("off", "emergency") and over:
            self.enter(state, "probe", share=0.02, until=self.now + 600)
        elif state.name == "probe" and seen.tested >= (1 if over else 512):
            self.enter(state, "ramp", share=0.1, until=self.now + 600) if passed else self.off(state)
        elif state.name == "ramp":
            low = self.is_low(seen) and (seen.alpha < 0.20 or state.low >= 2)
            undecided = over and state.clean == 0 and seen.s_low == seen.s_low  # open: how long a stage is
            thin = over and seen.tested >= 200  # open: too little in each minute
            if low or state.slow >= 3 or seen.fr > 0.05 or undecided:
                self.off(state)
            elif state.clean >= 2 or (thin and passed):
                self.advance(state)
            elif thin:
                self.off(state)
        elif state.name == "contract" and state.clean >= 3:
            self.enter(state, "on", gamma=state.gamma if self.adaptive else 16)

    def advance(self, state: State) -> None:
        if state.share == 1.0:
            self.enter(state, "on", settled=self.now)
        else:
            share = {0.1: 0.5, 0.5: 1.0}[state.share]
            self.enter(state, "ramp", share=share, until=self.now + 600)

    def is_low(self, seen: Seen) -> bool:
        return seen.alpha < 0.30 and not seen.s_low > 1.05

    def count(self, state: State, seen: Seen) -> None:
        """Ticks in a row; one without evidence breaks none."""
        most = 0.05 if state.name == "ramp" else 0.03
        good = state.name in ("ramp", "contract") and seen.s_low > 1.05 and not seen.fr >= most
        if seen.alpha == seen.alpha:
            state.low = state.low + 1 if self.is_low(seen) else 0
            state.slow = state.slow + 1 if seen.s_high < 1 else 0
            state.clean = state.clean + 1 if good else 0

    def best(self, key: State) -> int:
        """Open: over 2,000 tokens, and a deeper one must gain 1 %."""
        found = enough(self.ticks, "tested", 2000)
        counts = np.sum(self.ticks[-12:], axis=0) if found is None else found
        here = min(key.gamma, self.most)
        depth, s, _ = best_gamma(counts[None], min(self.most, 8))
        _, s_here, _ = best_gamma(counts[None], here)
        return here if depth[0] == 0 or (depth[0] > here and s[0] < 1.01 * s_here[0]) else int(depth[0])

    def off(self, state: State) -> None:
        on_for = self.now - state.settled if state.name in ("on", "contract") else -math.inf
        fresh = state.delay == 0 or on_for >= 1800  # open: when the doubling begins anew
        self.enter(state, "off", delay=30.0 if fresh else min(2 * state.delay, 1800.0))

    def enter(self, state: State, name: str, **changes: float) -> None:
        stopped = ("off", "emergency")
        state.epoch += name in stopped and state.name not in stopped
        state.name, state.since, state.until, state.share = name, self.now, None, 1.0
        state.low = state.slow = state.clean = 0
        for field, value in changes.items():
            setattr(state, field, value)
        self.moved = True

    def agrees(self, state: State, unit: Unit, is_key: bool) -> bool:
        if unit.state == "off":
            assert unit.until is not None and abs(unit.until - unit.since - state.delay) <= 0.1 * state.delay
            state.until = unit.until  # its jitter
        ours = state.name, state.since, state.until, state.share, state.delay, state.epoch
        theirs = unit.state, unit.since, unit.until, unit.share, unit.delay_s, unit.epoch
        gammas = {min(one.gamma, self.most) for one in (state, unit)}
        return ours == theirs and (not is_key or len(gammas) == 1)


def moods(draws: random.Random, gamma: int) -> Traffic:
    return Traffic(
        rounds=draws.choice([0, 5, 30, 200, 2000, 20_000]),
        alpha=draws.choice([0.05, 0.18, 0.25, 0.28, 0.35, 0.5, 0.7, 0.9]),
        gamma=gamma,
        cost=draws.choice([0.02, 0.1, 0.3, 0.5]),
        planned=draws.choice([0, 1, 5, 20, 100]),
        fallbacks=draws.choice([0, 0, 0, 0, 2, 4, 6, 11, 16]),  # per cent
    )


def told(mood: Traffic, share: float, gamma: int, draws: random.Random) -> Traffic:
    planned = round(mood.planned * share)
    fallbacks = sum(draws.random() < mood.fallbacks / 100 for _ in range(planned))
    rounds, alpha = round(mood.rounds * share * draws.uniform(0.5, 1.5)), mood.alpha * draws.uniform(0.9, 1.1)
    return Traffic(rounds, alpha, min(mood.gamma, gamma), mood.cost, planned, fallbacks)


@pytest.mark.parametrize("seed", range(8))
def test_the_controller_does_what_the_page_says(seed: int) -> None:
    draws = random.Random(seed)
    gamma, adaptive = draws.choice([2, 4, 8, 12]), draws.random() < 0.6
    tenant = Tenant.model_validate({"drafter": "a", "speculation": {"gamma": gamma, "adaptive": adaptive}})
    now, mood, visited = 1000.0, moods(draws, gamma), Counter[str]()
    control, page = Control({"bank": tenant}, {"a": "ngram"}, now=now), Page(gamma, adaptive, now)
    for number in range(1, 301):
        if draws.random() < 0.08:
            mood = moods(draws, gamma)
        allowed = control.policy.of(KEY)
        share = 0.0 if allowed.stops else allowed.share
        if allowed.state == "probe":
            share = max(share, min(1.0, 30 / max(1, mood.rounds)))  # one at a time
        traffic = told(mood, share, allowed.gamma, draws)
        control.fold(window(number, {KEY: traffic}))
        now += TICK_S
        control.tick(now)
        page.tick(row(traffic), now)
        memory = control.memory()["bank"]
        ((_, cls),), ((_, _, key),) = memory.classes, memory.keys
        for state, unit in ((page.tenant, memory.tenant), (page.request_class, cls), (page.key, key)):
            assert page.agrees(state, unit, unit is key), (number, state, unit)
            visited[unit.state] += 1
    assert len(visited) > 2
