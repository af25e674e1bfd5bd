"""Draft pools: one rule after the other, then all of them on a pool whose workers die as they like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from gammaray.routing import pools
from gammaray.routing.pools import (
    Action,
    Drain,
    Phase,
    PoolLimits,
    PoolState,
    Start,
    Stop,
    WorkerStats,
    decide,
)

TICK_S = 5.0


@dataclass
class Worker:
    """`ready_in` seconds after its start it is ready; None: never, it hangs."""

    version: str
    ready_in: float | None
    state: Phase = "starting"
    age: float = 0.0
    sequences: int = 0
    drained_for: float = 0.0


@dataclass
class Pool:
    """Carries out what `decide` says. The load is in workers: 1.5 keeps two of them busy at 75 %."""

    limits: PoolLimits = field(default_factory=lambda: PoolLimits(2, 4))
    version: str = "v1"
    load: float = 0.0
    start_s: float | None = 20.0
    fail: bool = False  # starts fail at once
    sequences: int = 0  # of each new worker; they stay until it stops
    state: PoolState = field(default_factory=PoolState)
    now: float = 0.0
    workers: dict[str, Worker] = field(default_factory=dict)
    made: int = 0

    def stats(self) -> list[WorkerStats]:
        ready = max(1, len(self.having("ready")))
        busy, queued = min(1.0, self.load / ready), int(max(0.0, self.load - ready) * 20 / ready)
        return [
            WorkerStats(name, w.version, w.state, busy, queued, w.sequences)
            if w.state == "ready"
            else WorkerStats(name, w.version, w.state, sequences=w.sequences)
            for name, w in self.workers.items()
        ]

    def having(self, *states: Phase) -> list[str]:
        return [name for name, worker in self.workers.items() if worker.state in states]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.workers.values():
            worker.age += seconds
            worker.drained_for += seconds * (worker.state == "draining")
            if worker.state == "starting" and worker.ready_in is not None and worker.age >= worker.ready_in:
                worker.state, worker.sequences = "ready", self.sequences

    def tick(self, seconds: float = TICK_S) -> tuple[Action, ...]:
        self.pass_time(seconds)
        self.state, actions = decide(self.state, self.stats(), self.limits, self.version, self.now)
        for action in actions:
            self.carry_out(action)
        return actions

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Stop):
            del self.workers[action.id]
        elif isinstance(action, Drain):
            self.workers[action.id].state = "draining"
        else:
            for _ in range(action.count):
                self.made += 1
                worker = Worker(action.version, self.start_s, "lost" if self.fail else "starting")
                self.workers[f"w{self.made}"] = worker

    def run(self, seconds: float) -> list[tuple[float, Action]]:
        """What was done, and when."""
        done = []
        for _ in range(int(seconds / TICK_S)):
            done += [(self.now, action) for action in self.tick()]
        return done


def settled(workers: int = 2, most: int = 4, load: float = 0.0, sequences: int = 0) -> Pool:
    """As many workers as it must have are ready."""
    pool = Pool(PoolLimits(workers, most), load=load, sequences=sequences)
    pool.run(120)
    assert len(pool.having("ready")) == len(pool.workers) == pool.limits.workers
    return pool


def new(pool: Pool) -> list[Worker]:
    return [worker for worker in pool.workers.values() if (worker.version, worker.state) == ("v2", "ready")]


def kinds(done: Sequence[tuple[float, Action]]) -> list[type[Action]]:
    return [type(action) for _, action in done]


# Size -------------------------------------------------------------------------------------------------


def test_an_empty_pool_starts_its_workers_at_once_and_rests() -> None:
    pool = Pool()
    assert pool.tick() == (Start("v1", 2),)
    assert pool.run(600) == []
    assert pool.state.serving == "v1"


def test_two_busy_ticks_add_one_worker() -> None:
    pool = settled()
    pool.load = 1.9  # 95 % of two, 63 % of three
    assert pool.tick() == ()
    assert pool.tick() == (Start("v1", 1),)
    assert pool.run(3600) == []


def test_one_busy_tick_adds_nothing() -> None:
    pool = settled()
    for load in (1.9, 0.9) * 20:
        pool.load = load
        assert pool.tick() == ()


def test_a_queue_adds_a_worker_though_the_workers_look_idle() -> None:
    def queue(each: int) -> Sequence[Action]:
        state, stats = PoolState(), [WorkerStats(name, "v1", "ready", 0.1, each) for name in "ab"]
        for now in range(0, 60, 5):
            state, actions = decide(state, stats, PoolLimits(2, 4), "v1", now)
            if actions:
                return actions
        return ()

    assert queue(5) == (Start("v1", 1),)
    assert queue(4) == ()


def test_workers_are_added_one_at_a_time_with_a_rest_in_between() -> None:
    pool = settled()
    pool.load = 9.0
    done = pool.run(600)
    assert [action for _, action in done] == [Start("v1", 1)] * 2  # up to max_workers
    assert done[1][0] - done[0][0] >= 20 - TICK_S + pools.COOL_DOWN_S  # it starts for 20 s


def test_a_worker_too_many_leaves_after_two_quiet_minutes_drained_first() -> None:
    pool = settled(3, 3, load=2.0)  # two would be at 100 %
    pool.limits, pool.load, began = PoolLimits(1, 3), 0.1, pool.now
    done = pool.run(600)
    assert kinds(done) == [Drain, Stop] * 2 and len(pool.having("ready")) == 1
    assert done[0][0] - began == pytest.approx(pools.LOW_S, abs=2 * TICK_S)
    assert done[2][0] - done[0][0] >= pools.LOW_S


def test_nothing_leaves_if_the_others_would_then_be_busy() -> None:
    pool = settled(3, 3, load=1.3)  # two would be at 65 %
    pool.limits = PoolLimits(2, 3)
    assert pool.run(3600) == []
    pool.load = 1.1  # two would be at 55 %
    assert kinds(pool.run(3600)) == [Drain, Stop]


def test_a_quiet_moment_within_a_busy_time_takes_nobody_away() -> None:
    pool = settled(3, 3, load=1.5)
    pool.limits = PoolLimits(2, 3)
    for load in (0.5, 1.5) * 20:
        pool.load = load
        assert pool.run(100) == []


def test_limits_that_change_are_followed() -> None:
    pool = settled()
    pool.limits = PoolLimits(4, 4)
    assert pool.tick() == (Start("v1", 2),)
    pool.run(100)
    pool.limits = PoolLimits(1, 2)
    assert kinds([(0, action) for action in pool.tick()]) == [Drain, Drain]
    pool.run(600)
    assert len(pool.workers) == 1  # without load


def test_workers_that_still_start_stop_when_fewer_are_wanted() -> None:
    pool = Pool(PoolLimits(3, 3))
    pool.tick()
    pool.limits = PoolLimits(1, 1)
    assert pool.tick() == (Stop("w1"), Stop("w2"))
    assert pool.run(600) == []


def test_a_worker_that_drains_stops_when_it_is_empty_or_out_of_time() -> None:
    pool = settled(sequences=3)
    pool.limits = PoolLimits(1, 1)
    (drained,) = pool.tick()
    assert isinstance(drained, Drain)
    assert pool.run(50) == []
    pool.workers[drained.id].sequences = 0
    assert pool.tick() == (Stop(drained.id),)
    pool = settled(sequences=3)
    pool.limits, began = PoolLimits(1, 1), pool.now
    done = pool.run(200)
    assert kinds(done) == [Drain, Stop]
    assert done[1][0] - done[0][0] == pytest.approx(pools.DRAIN_LIMIT_S) and done[0][0] > began


def test_the_worker_with_the_fewest_sequences_goes() -> None:
    pool = settled()
    pool.workers["w1"].sequences = 2
    pool.limits = PoolLimits(1, 1)
    assert pool.tick() == (Drain("w2"),)


def test_an_action_that_came_to_nothing_is_given_again() -> None:
    pool = settled(sequences=1)
    pool.limits = PoolLimits(1, 1)
    first = pool.tick()
    for worker in pool.workers.values():
        worker.state = "ready"  # it never heard
    assert pool.tick() == first
    assert isinstance(first[0], Drain)


# Losses -----------------------------------------------------------------------------------------------


def test_losses_are_replaced_with_a_backoff_that_doubles_to_a_cap() -> None:
    pool = settled(1, 1)
    waits = []
    for _ in range(9):
        (name,) = pool.workers
        pool.workers[name].state = "lost"
        assert pool.tick(1.0) == (Stop(name),)
        lost = pool.now
        while not pool.workers:
            pool.tick(0.5)
        waits.append(pool.now - lost)
        pool.tick(pool.start_s or 0.0)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    pool.run(pools.STEADY_S)
    assert pool.state.losses == {}


def test_a_node_that_takes_several_workers_with_it_counts_once() -> None:
    pool = settled(4, 4)
    for name in ("w1", "w2", "w3"):
        pool.workers[name].state = "lost"
    pool.tick(1.0)
    assert pool.tick(1.0) == (Start("v1", 3),)


def test_a_controller_without_memory_takes_a_draining_worker_for_no_loss() -> None:
    pool = settled(sequences=1)
    pool.workers["w1"].state = "draining"
    pool.state = PoolState()
    assert pool.tick() == (Start("v1", 1),)
    assert (pool.state.losses, pool.state.serving) == ({}, "v1")


def test_a_start_that_hangs_is_ended_and_tried_again() -> None:
    pool = Pool(PoolLimits(1, 1), start_s=None)
    done = pool.run(pools.START_LIMIT_S + 20)
    assert kinds(done) == [Start, Stop, Start]


def test_a_pool_that_never_served_goes_on_trying() -> None:
    pool = Pool(PoolLimits(1, 1), fail=True)
    done = pool.run(3600)
    assert pool.state.given_up is None
    assert 3600 / 65 - 5 < kinds(done).count(Start) < 3600 / 60 + 10
    pool.fail = False
    pool.run(200)
    assert pool.having("ready")


# Versions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [PoolLimits(1, 1), PoolLimits(3, 3), PoolLimits(2, 6)])
def test_a_new_version_comes_up_before_the_old_one_goes(limits: PoolLimits) -> None:
    pool = settled(limits.workers, limits.max_workers)
    pool.version = "v2"
    for worker in pool.workers.values():
        worker.sequences = 2  # more than the new ones have
    done: list[Action] = []
    for _ in range(200):
        done += pool.tick()
        assert limits.workers <= len(pool.having("ready"))
        assert len(pool.having("starting", "ready")) <= limits.workers + 1
        assert len(pool.workers) <= limits.max_workers + 1
    assert Counter(map(type, done)) == dict.fromkeys((Start, Drain, Stop), limits.workers)
    assert {worker.version for worker in pool.workers.values()} == {"v2"}
    assert (pool.state.serving, len(pool.workers)) == ("v2", limits.workers)


def test_a_version_that_never_becomes_ready_is_given_up_and_the_old_one_stays() -> None:
    pool = settled()
    pool.version, pool.fail = "v2", True
    done = pool.run(600)
    assert [a for _, a in done if isinstance(a, Start)] == [Start("v2", 1)] * pools.FAILED_STARTS
    assert (pool.state.given_up, pool.state.serving, pool.state.wanted) == ("v2", "v1", "v1")
    assert {worker.version for worker in pool.workers.values()} == {"v1"} and len(pool.workers) == 2
    pool.fail = False
    pool.workers["w1"].state = "lost"
    assert kinds(pool.run(100)) == [Stop, Start]
    assert {worker.version for worker in pool.workers.values()} == {"v1"} and len(pool.workers) == 2


def test_a_version_that_hangs_is_given_up_too() -> None:
    pool = settled()
    pool.version, pool.start_s = "v2", None
    pool.run(pools.FAILED_STARTS * (pools.START_LIMIT_S + 70))
    assert pool.state.given_up == "v2" and len(pool.having("ready")) == len(pool.workers) == 2


def test_a_version_with_a_ready_worker_has_no_failed_starts() -> None:
    pool = settled()
    pool.version, pool.fail = "v2", True
    while "v2" not in pool.state.losses:
        pool.tick()
    pool.fail = False
    while not pool.having("starting"):
        pool.tick()
    pool.fail = True  # but for this one
    pool.run(600)
    assert pool.state.losses["v2"].ticks > pools.FAILED_STARTS
    assert pool.state.given_up is None and len(new(pool)) == 1


def test_the_loss_of_ready_workers_is_no_failed_start() -> None:
    pool = settled(4, 4)
    pool.version = "v2"
    while len(new(pool)) < 3:
        pool.tick()
    for worker in new(pool):
        worker.state = "lost"
    pool.tick()
    assert pool.state.given_up is None
    pool.run(900)
    assert Counter(worker.version for worker in pool.workers.values()) == {"v2": 4}


def test_asking_anew_tries_what_was_given_up_again() -> None:
    pool = settled()
    for version, fail in (("v2", True), ("v1", False), ("v2", False)):
        pool.version, pool.fail = version, fail
        pool.run(600)
    assert (pool.state.serving, pool.state.given_up) == ("v2", None)


def test_turning_back_in_the_middle_ends_what_starts() -> None:
    pool = settled()
    pool.version = "v2"
    pool.tick()
    (starting,) = pool.having("starting")
    pool.version = "v1"
    assert pool.tick() == (Stop(starting),)
    assert pool.run(600) == []


# Everything together ----------------------------------------------------------------------------------


class Chaos(RuleBasedStateMachine):
    """Ticks of any length, workers that die or hang, versions that never start, limits and load that move."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()

    @rule(seconds=st.sampled_from([0.5, 5.0, 5.0, 30.0, 130.0]), times=st.integers(1, 8))
    def tick(self, seconds: float, times: int) -> None:
        for _ in range(times):
            self.checked_tick(seconds)

    def checked_tick(self, seconds: float) -> tuple[Action, ...]:
        pool, limits = self.pool, self.pool.limits
        pool.pass_time(seconds)
        before, ready = dict(pool.workers), pool.having("ready")
        present = len(pool.having("starting", "ready", "draining"))
        empty = {name for name, worker in before.items() if not worker.sequences}
        phases = {name: worker.state for name, worker in before.items()}
        actions = pool.tick(0.0)
        for action in actions:
            if isinstance(action, Stop) and phases[action.id] in ("ready", "draining"):
                drained = before[action.id].drained_for
                assert phases[action.id] == "draining"
                assert action.id in empty or drained >= pools.DRAIN_LIMIT_S - 1e-6
            if isinstance(action, Start):
                assert action.version == pool.state.wanted
        versions = {w.version for w in before.values() if w.state != "lost"} | {pool.state.wanted}
        now_present = len(pool.having("starting", "ready", "draining"))
        started = sum(action.count for action in actions if isinstance(action, Start))
        assert not started or present + started <= limits.max_workers + (len(versions) > 1)
        assert now_present <= max(present, limits.max_workers + (len(versions) > 1))
        assert len(pool.having("ready")) >= min(limits.workers, len(ready))
        assert limits.workers <= pool.state.size <= limits.max_workers
        assert len(actions) == len({action.id for action in actions if not isinstance(action, Start)}) + bool(
            started
        )
        return actions

    @precondition(lambda self: self.pool.having("starting", "ready", "draining"))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.pool.having("starting", "ready", "draining")))
        self.pool.workers[name].state = "lost"

    @precondition(lambda self: self.pool.having("draining"))
    @rule()
    def end_sequences(self) -> None:
        for name in self.pool.having("draining"):
            self.pool.workers[name].sequences = 0

    @rule(version=st.sampled_from(["v1", "v2", "v3"]))
    def ask(self, version: str) -> None:
        self.pool.version = version

    @rule(workers=st.integers(1, 4), more=st.integers(0, 3))
    def limit(self, workers: int, more: int) -> None:
        self.pool.limits = PoolLimits(workers, workers + more)

    @rule(load=st.floats(0, 8), sequences=st.integers(0, 3))
    def use(self, load: float, sequences: int) -> None:
        self.pool.load, self.pool.sequences = load, sequences

    @rule(start_s=st.none() | st.floats(0, 90), fail=st.booleans())
    def spoil(self, start_s: float | None, fail: bool) -> None:
        self.pool.start_s, self.pool.fail = start_s, fail

    @rule()
    def forget(self) -> None:
        """The controller comes back without its memory."""
        self.pool.state = PoolState()

    def teardown(self) -> None:
        """Nothing fails any more, and the load stands still: it settles, as was asked, and rests."""
        pool = self.pool
        pool.fail, pool.start_s = False, 30.0
        for _ in range(720):
            self.checked_tick(10.0)
        assert pool.run(3600) == []
        assert len(pool.having("ready")) == len(pool.workers) == pool.state.size
        assert Counter(w.version for w in pool.workers.values()) == {pool.state.wanted: pool.state.size}
        assert pool.state.wanted == (pool.version if pool.state.given_up is None else pool.state.serving)


TestChaos = Chaos.TestCase
TestChaos.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
