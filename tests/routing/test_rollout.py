"""Verdicts on shadows, by simulation of their rounds; then whole trials beside Control's policy."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from gammaray.config import Tenant
from gammaray.errors import NotFound
from gammaray.routing.control import Control
from gammaray.routing.orders import Order
from gammaray.routing.registry import Version
from gammaray.routing.rollout import Rollout
from gammaray.routing.verdict import LIMIT_S, Evidence, Ratio, judge, p99, predicted_p99
from gammaray.routing.window import COLUMN, WIDTH, Counts, Window
from gammaray.types import Finished, Key, KeyPolicy, PolicySnapshot, Quality, SpeculationStats

GAMMA, TOKENS, BASE_S = 4, 64, 0.02
SPREAD = 20.0  # of the beta distribution of acceptance over requests: a standard deviation of 0.11 about 0.6
OTHERS = 19  # requests of the current version for one in the shadow
SLOWER = 1.2 / 0.9 - 1  # extra time at which S is 10 % lower than at 0.2


def stats(draw: np.random.Generator, n: int, alpha: float) -> Counts:
    """[n, 4] rounds, emitted, tested and accepted of requests, each with an acceptance of its own."""
    own = draw.beta(alpha * SPREAD, (1 - alpha) * SPREAD, (n, 1))
    accepts = draw.random((n, TOKENS + GAMMA)) < own
    accepted = np.cumprod(np.lib.stride_tricks.sliding_window_view(accepts, GAMMA, axis=1), axis=2).sum(2)
    starts = _starts(accepted)
    each = accepted[:, :TOKENS]
    left = TOKENS - np.arange(TOKENS)  # the last round is cut
    emitted = np.minimum(each + 1, left)
    columns = starts, starts * emitted, starts * np.minimum(each + 1, GAMMA), starts * each
    return np.stack([column.sum(1) for column in columns], axis=1).astype(float)


def _starts(accepted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    starts = np.zeros((len(accepted), TOKENS), bool)
    at = np.zeros(len(accepted), int)
    while (inside := np.flatnonzero(at < TOKENS)).size:
        starts[inside, at[inside]] = True
        at[inside] += accepted[inside, at[inside]] + 1
    return starts


class Side:
    """Evidence after the first n requests, for any n."""

    def __init__(self, requests: Counts, extra: float) -> None:
        rounds, emitted, tested, accepted = TOKENS * (requests / requests[:, 1:2]).T
        self._extra, self._rounds = extra, np.cumsum(rounds)
        self._tau, self._alpha = _moments(emitted, rounds), _moments(accepted / tested, np.ones(len(rounds)))
        self._tested = np.cumsum(requests[:, 2])
        self._slowness = np.cumsum(np.log(rounds / emitted)[:, None] ** np.arange(5), axis=0)

    def after(self, n: int) -> Evidence:
        counts = np.zeros(WIDTH)
        counts[COLUMN["rounds"]] = rounds = self._rounds[n - 1]
        counts[COLUMN["base_s"]], counts[COLUMN["extra_s"]] = BASE_S * rounds, BASE_S * self._extra * rounds
        counts[COLUMN["tested"]] = self._tested[n - 1]
        tau, alpha = Ratio(n, *self._tau[n - 1]), Ratio(n, *self._alpha[n - 1])
        return Evidence(counts, tau, alpha, self._slowness[n - 1])


def _moments(y: Counts, x: Counts) -> Counts:
    return np.cumsum(np.stack([y, x, y * y, x * y, x * x], axis=1), axis=0)


def run(seed: int, alpha: float, extra: float, most: int = 2000, limit: float = math.inf) -> tuple[str, int]:
    """Beside a version of alpha 0.6 and extra 0.2, judged every 10 requests; and how many it took."""
    draw = np.random.default_rng(seed)
    shadow = Side(stats(draw, most, alpha), extra)
    current = Side(stats(draw, 2 * most, 0.6), 0.2)
    for n in range(10, most + 1, 10):
        waited_s = LIMIT_S if n >= limit else 0.0
        verdict = judge(shadow.after(n), current.after(min(OTHERS * n, 2 * most)), waited_s)
        if verdict.outcome != "wait":
            return verdict.outcome, n
    return "wait", most


def outcomes(alpha: float, extra: float, seeds: int, **more: Any) -> tuple[Counter[str], float]:
    found = [run(seed, alpha, extra, **more) for seed in range(seeds)]
    return Counter(outcome for outcome, _ in found), float(np.median([n for _, n in found]))


@pytest.mark.parametrize(
    ("alpha", "extra", "expected"),
    [
        (0.6, 0.2, "accept"),  # equal; some still wait, as 1500 requests do not always tell
        (0.66, 0.2, "accept"),
        (0.54, 0.2, "reject"),
        (0.6, SLOWER, "reject"),
    ],
)
def test_noise_neither_accepts_nor_rejects(alpha: float, extra: float, expected: str) -> None:
    found, _ = outcomes(alpha, extra, seeds=40, most=1500)
    wrong = {"accept": "reject", "reject": "accept"}[expected]
    assert found[wrong] == 0, found
    assert found[expected] >= (25 if (alpha, extra) == (0.6, 0.2) else 40), found


def test_when_time_is_over_the_point_estimates_decide() -> None:
    equal, _ = outcomes(0.6, 0.2, seeds=40, most=300, limit=200)
    worse, _ = outcomes(0.54, 0.2, seeds=40, most=300, limit=200)
    assert equal["wait"] == worse["wait"] == 0
    assert equal["accept"] >= 34 and worse["reject"] == 40


def test_a_tail_alone_can_reject() -> None:
    """One request in ten takes half as long again; the mean of the others makes up for it."""
    draw = np.random.default_rng(3)
    plain = stats(draw, 4000, 0.6)
    current, shadow = Side(plain, 0.2).after(4000), Side(plain, 0.2).after(4000)
    slow = draw.random(4000) < 0.1
    slowness = np.log(plain[:, 0] / plain[:, 1]) + np.where(slow, np.log(1.5), 0.0)
    shadow.slowness = (slowness[:, None] ** np.arange(5)).sum(0)
    verdict = judge(shadow, current)
    assert verdict.outcome == "reject" and verdict.reason.startswith("tpot_p99_s"), verdict
    assert verdict.numbers["S"] == verdict.numbers["current_S"]


def test_a_request_is_one_observation_however_many_rounds_it_has() -> None:
    """The error of tau is that of means drawn over and over."""
    drawn = [Side(stats(np.random.default_rng(s), 50, 0.6), 0.2).after(50).tau.measured for s in range(300)]
    told = np.mean([error for _, error in drawn])
    assert told == pytest.approx(np.std([value for value, _ in drawn]), rel=0.15)


def test_p99_of_a_log_normal_sample_and_its_error() -> None:
    draw = np.random.default_rng(7)
    samples = np.exp(draw.normal(-4.0, 0.3, (400, 200)))
    found = [p99((np.log(each)[:, None] ** np.arange(5)).sum(0)) for each in samples]
    exact = math.exp(-4.0 + 0.3 * 2.326347874)
    assert np.mean([value for value, _ in found]) == pytest.approx(exact, rel=0.01)
    told = np.mean([error for _, error in found])
    assert told == pytest.approx(np.std([value for value, _ in found]), rel=0.1)


def test_load_is_no_difference_between_versions() -> None:
    requests = stats(np.random.default_rng(1), 400, 0.6)
    quiet, busy = Side(requests, 0.2).after(400), Side(requests, 0.2).after(400)
    busy.counts[[COLUMN["base_s"], COLUMN["extra_s"]]] *= 3
    assert predicted_p99(quiet, busy) == pytest.approx(predicted_p99(busy, quiet))
    step_s = 2 * BASE_S * 1.2  # the mean of 1 and 3
    slowest = np.quantile(requests[:, 0] / requests[:, 1], 0.99)
    assert predicted_p99(quiet, busy).value == pytest.approx(step_s * slowest, rel=0.05)


def test_little_traffic_waits_and_is_rejected_in_the_end() -> None:
    few = Side(stats(np.random.default_rng(1), 19, 0.6), 0.2).after(19)
    more = Side(stats(np.random.default_rng(2), 400, 0.6), 0.2).after(400)
    assert judge(few, more, LIMIT_S - 1).outcome == "wait"
    late = judge(few, more, LIMIT_S)
    assert late.outcome == "reject" and "19 requests of 20" in late.reason
    assert judge(more, few, 0.0).outcome == "wait", "the current version has too little"
    assert judge(more, few, LIMIT_S).numbers.keys() == {"S", "current_S"}, "then it counts as plain"


@pytest.mark.parametrize(("extra", "outcome"), [(0.2, "accept"), (2.0, "reject"), (1.24, "wait")])
def test_without_a_current_version_it_must_be_faster_than_plain(extra: float, outcome: str) -> None:
    side = Side(stats(np.random.default_rng(1), 100, 0.6), extra).after(100)
    assert judge(side, None).outcome == outcome, side.speedup


def test_unknown_times_accept_nothing() -> None:
    sides = [Side(stats(np.random.default_rng(s), 400, 0.6), 0.2).after(400) for s in (1, 2)]
    for side in sides:
        side.counts[[COLUMN["base_s"], COLUMN["extra_s"]]] = 0
    assert judge(*sides).outcome == "wait"
    assert judge(*sides, LIMIT_S).outcome == "reject"


V1, V2, V3 = "chat-v1", "chat-v2", "chat-v3"
KEYS: dict[str, Key] = {name: ("chat", "default", name) for name in (V1, V2, V3)}


def drafters(**versions: str) -> dict[str, Version]:
    numbers = {V1: "1", V2: "1", V3: "1"} | {f"chat-{name}": number for name, number in versions.items()}
    return {name: Version(name, number, "model") for name, number in numbers.items()}


def tenant(canary: str | None = V2, **speculation: Any) -> Tenant:
    trial = {"canary": {"drafter": canary}} if canary else {}
    return Tenant.model_validate({"drafter": V1, "speculation": trial | speculation})


def policy(used: str | None = None, **states: Any) -> PolicySnapshot:
    keys = {KEYS[f"chat-{name}"]: KeyPolicy(state) for name, state in states.items()}
    return PolicySnapshot(keys=keys, drafters={("chat", "default"): used} if used else {})


SHADOW = policy(v2="shadow")


class Rig:
    """Feeds windows of a shadow of `alpha` beside a current version of 0.6."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout, self.now, self.number = rollout, 0.0, 0
        self.draw = np.random.default_rng(5)

    def feed(self, alpha: float, n: int = 200, drafter: str = V2) -> None:
        groups = (
            (KEYS[drafter], stats(self.draw, n, alpha)),
            (KEYS[V1], stats(self.draw, n, 0.6)),
        )
        finished = [ended(key, *row, shadow=key != KEYS[V1]) for key, rows in groups for row in rows]
        counts = np.zeros((2, WIDTH))
        for row, (_, rows) in zip(counts, groups, strict=True):
            rounds = rows[:, 0].sum()
            row[[COLUMN[name] for name in ("rounds", "base_s", "extra_s", "tested")]] = (
                rounds,
                rounds * BASE_S,
                rounds * BASE_S * 0.2,
                rows[:, 2].sum(),
            )
        self.fold(finished, counts, tuple(key for key, _ in groups))

    def fold(
        self, finished: list[Finished], counts: Counts | None = None, keys: tuple[Key, ...] = ()
    ) -> None:
        self.number += 1
        rows = np.zeros((0, WIDTH)) if counts is None else counts
        for _ in range(2):  # told again, it counts once
            self.rollout.fold(Window("replica", self.number, keys, rows, tuple(finished)))

    def tick(self, seen: PolicySnapshot = SHADOW) -> list[tuple[str, str | None]]:
        self.now += 5.0
        return [(order.action, order.drafter) for order in self.rollout.tick(self.now, seen)]


def ended(key: Key, rounds: float, emitted: float, tested: float, accepted: float, **more: Any) -> Finished:
    counts = SpeculationStats(
        rounds=int(rounds), emitted=int(emitted), tested=int(tested), first_accepted=int(accepted)
    )
    told: dict[str, Any] = {"shadow": False, "reason": "stop", "fallback": None, "index": 0, "state": "on"}
    told |= {"prompt_tokens": 9, "cached_tokens": 0, "output_tokens": TOKENS, "stats": counts}
    return Finished(*key, **told | more)


def audited(kl: float, tokens: int = 200, key: Key = KEYS[V1]) -> Finished:
    return ended(key, 30, 64, 60, 34, quality=Quality(tokens, kl, 8.0))


@pytest.fixture
def rig() -> Rig:
    return Rig(Rollout({"chat": tenant()}, drafters()))


def stages(rollout: Rollout) -> list[tuple[str, str | None]]:
    return [(stage, version.drafter) for stage, version in rollout.line("chat", "default").stages()]


def test_a_better_version_is_accepted_and_current_once_its_class_uses_it(rig: Rig) -> None:
    rollout = rig.rollout
    assert stages(rollout) == [("current", V1), ("candidate", V2)]
    assert rig.tick() == [] and rollout.verdict("chat", "default") is not None
    rig.feed(0.7)
    assert rig.tick() == [("accept", V2)]
    assert rollout.line("chat", "default").live
    rig.feed(0.2)
    assert rig.tick(policy(v2="warmup")) == rig.tick(policy(v2="ramp")) == [], "now Control's rules judge it"
    assert rig.tick(policy(used=V2)) == []
    assert stages(rollout) == [("current", V2), ("previous", V1)]


def test_a_worse_version_is_rejected_and_compared_anew_when_it_is_in_the_shadow_again(rig: Rig) -> None:
    rig.feed(0.5)
    assert rig.tick() == [("reject", V2)]
    assert rig.tick(policy(v2="off")) == []
    assert stages(rig.rollout) == [("current", V1), ("rejected", V2)]
    assert rig.tick(SHADOW) == [], "the old evidence is gone"
    assert stages(rig.rollout) == [("current", V1), ("candidate", V2)]
    rig.feed(0.7)
    assert rig.tick() == [("accept", V2)]


def test_one_that_fails_behind_the_shadow_is_compared_anew(rig: Rig) -> None:
    rig.feed(0.7)
    rig.tick()
    rig.tick(policy(v2="warmup"))
    rig.tick(policy(v2="off"))
    rig.tick(SHADOW)
    line = rig.rollout.line("chat", "default")
    assert line.candidate is not None and not line.live and line.candidate.since == rig.now


def test_an_operator_may_accept_without_a_verdict(rig: Rig) -> None:
    rig.tick(policy(v2="warmup"))
    assert rig.rollout.line("chat", "default").live


def test_what_the_configuration_withdraws_or_changes_is_followed(rig: Rig) -> None:
    rollout = rig.rollout
    rollout.employ({"chat": tenant(V3)}, drafters(), 1.0)
    assert rig.tick() == [("reject", V2)]
    assert stages(rollout) == [("current", V1), ("candidate", V3), ("rejected", V2)]
    rollout.employ({"chat": tenant(None)}, drafters(), 2.0)
    assert rig.tick(policy(v3="shadow")) == [("reject", V3)]
    rollout.employ({"chat": tenant(V2)}, drafters(), 3.0)
    assert stages(rollout)[1] == ("rejected", V3), "it was rejected: Control's time off comes first"
    rollout.employ({"chat": tenant(V2)}, drafters(v2="2"), 4.0)
    assert stages(rollout)[1] == ("candidate", V2), "a new one is"
    rollout.employ({}, drafters(), 5.0)
    assert "chat" in rollout.dirty() and rollout.memory() == {}
    with pytest.raises(NotFound, match="no class 'default' of a tenant 'chat'"):
        rollout.line("chat", "default")


def test_memory_restores_lines_audits_and_revisions_but_no_evidence(rig: Rig) -> None:
    rollout = rig.rollout
    assert rollout.dirty() == {"chat"}
    rig.feed(0.7)
    rig.tick()
    rig.fold([audited(0.2)])
    rig.tick(policy(v2="warmup"))
    rollout.employ({"chat": tenant(gamma=7)}, drafters(), rig.now)
    assert rollout.dirty() == {"chat"} and rollout.dirty() == set()
    again = Rollout({"chat": tenant(gamma=7)}, drafters(), rollout.memory(), rig.now)
    assert again.memory() == rollout.memory() and again.dirty() == set()
    assert again.line("chat", "default") == rollout.line("chat", "default")
    assert again.roll_back_policy("chat").speculation.gamma == 4
    gone = Rollout({}, drafters(), rollout.memory(), rig.now)
    assert gone.memory() == {} and gone.dirty() == {"chat"}


def test_a_restart_in_the_middle_of_a_trial_waits_as_long_in_all(rig: Rig) -> None:
    again = Rig(Rollout({"chat": tenant()}, drafters(), rig.rollout.memory(), LIMIT_S / 2))
    again.now = LIMIT_S
    assert again.tick() == [("reject", V2)]


def test_a_violation_turns_the_key_off_once_and_rolls_the_drafter_back(rig: Rig) -> None:
    rig.tick(policy(used=V2))
    assert stages(rig.rollout)[0] == ("current", V2)
    rig.fold([audited(0.2, 199, KEYS[V2])])
    assert rig.tick(policy(used=V2)) == [] and rig.rollout.audit == {KEYS[V2]}
    rig.fold([audited(0.2, 1, KEYS[V2])])
    assert rig.tick(policy(used=V2)) == [("violation", V2)]
    assert stages(rig.rollout) == [("current", V1), ("rejected", V2)]
    rig.fold([audited(0.2, 400, KEYS[V2])])
    off = policy(v2="off")
    assert rig.tick(off) == rig.tick(off) == [], "what was under way when it was turned off is no news"
    assert rig.rollout.audit == frozenset()
    rig.fold([audited(0.0, 199, KEYS[V2])])
    assert rig.tick(policy(v2="probe")) == [], "the operator's reset begins anew"
    again = Rig(Rollout({"chat": tenant()}, drafters(v2="2"), rig.rollout.memory(), 99.0))
    assert again.tick(off)[0] == ("reset", V2), "a new version is free again"


def test_without_roll_back_on_violation_the_version_stays() -> None:
    gate = {"rollback_on_violation": False}
    rig = Rig(Rollout({"chat": tenant(quality_gate=gate)}, drafters()))
    rig.tick(policy(used=V2))
    rig.fold([audited(0.2, key=KEYS[V2])])
    assert rig.tick(policy(used=V2)) == [("violation", V2)]
    assert stages(rig.rollout) == [("current", V2), ("previous", V1)]


def test_a_violation_in_the_shadow_ends_the_trial_and_a_pass_does_not(rig: Rig) -> None:
    rig.fold([audited(0.01, key=KEYS[V2])])
    assert rig.tick() == [] and rig.rollout.audit == frozenset(), "passed: due again in 24 h"
    rig = Rig(Rollout({"chat": tenant()}, drafters()))
    rig.fold([audited(0.06, key=KEYS[V2])])
    assert rig.tick() == [("violation", V2)]
    assert stages(rig.rollout) == [("current", V1), ("rejected", V2)]


def test_the_gate_looks_at_classes_and_drafters_that_there_are(rig: Rig) -> None:
    strangers: list[Key] = [("gone", "default", V1), ("chat", "gone", V1), ("chat", "default", "old")]
    rig.fold(
        [audited(9.0, key=key) for key in [*strangers, ("chat", "warmup", V1), ("chat", "default", None)]]
    )
    assert rig.tick() == [] and rig.rollout.audit == frozenset()


def test_drafter_and_policy_go_back_without_touching_each_other(rig: Rig) -> None:
    rollout = rig.rollout
    rig.tick(policy(used=V2))
    deep = tenant(gamma=7)
    rollout.employ({"chat": deep}, drafters(), rig.now)
    before = rollout.line("chat", "default")
    shallow = rollout.roll_back_policy("chat")
    assert shallow.speculation.gamma == 4 and shallow.speculation.canary == deep.speculation.canary
    assert rollout.line("chat", "default") == before
    order = rollout.roll_back_drafter("chat", "default", "by hand", 9.0)
    assert (order.action, order.drafter, order.reason) == ("violation", V2, "by hand")
    assert stages(rollout) == [("current", V1), ("rejected", V2)]
    assert [revision.number for revision in rollout.remembered("chat").revisions] == [1]
    with pytest.raises(NotFound, match="no previous version"):
        rollout.roll_back_drafter("chat", "default", "again", 10.0)


class Both:
    """A rollout and the Control that carries its orders out, as the controller has them."""

    def __init__(self, **speculation: Any) -> None:
        tenants = {"chat": tenant(V2, **speculation).model_copy(update={"warmup_s": 0.0})}
        self.control = Control(tenants, dict.fromkeys(drafters(), "model"))
        self.rig = Rig(Rollout(tenants, drafters()))

    def tick(self) -> str:
        """The state of the candidate then."""
        rig = self.rig
        rig.now += 5.0
        for order in rig.rollout.tick(rig.now, self.control.policy):
            self.control.act(order, rig.now)
        self.control.tick(rig.now)
        return self.control.policy.of(KEYS[V2]).state

    def run(self, until: str) -> float:
        began = self.rig.now
        while self.tick() != until:
            assert self.rig.now - began < 4000, f"it never came to {until}"
        return self.rig.now - began


def test_control_carries_the_orders_of_a_trial_out() -> None:
    both = Both()
    assert both.tick() == "shadow"
    both.rig.feed(0.5)
    assert both.tick() == "off"
    assert stages(both.rig.rollout) == [("current", V1), ("rejected", V2)]
    assert 1500 < both.run("shadow") < 2200, "after Control's longest time off"
    both.tick()
    assert stages(both.rig.rollout)[1] == ("candidate", V2)
    both.rig.feed(0.75)
    assert both.tick() == "ramp" and both.rig.rollout.line("chat", "default").live


def test_control_carries_the_gate_out() -> None:
    both = Both()
    both.tick()
    both.rig.fold([audited(0.2, key=KEYS[V2])])
    assert both.tick() == "off"
    for _ in range(1000):
        assert both.tick() == "off", "only the operator ends it"
    both.control.act(Order("reset", "chat", "default", V2), both.rig.now)
    assert both.tick() == "shadow"
