"""The draft link in simulated time: an engine, a worker on a device of its own, and every fault between them.

Each text is compared with that of the undisturbed plain run, with the state oracle on; each time is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rig import CLOSE, GAMMA, LANGUAGE, LEVEL_S, VERIFY_S, Rig, SimEngine, plainly, requests
from support.simlink import Dialect, draft_worker, remote

from gammaray.actors.link.frames import Kind, pack_text
from gammaray.actors.link.server import ServerStats
from gammaray.engine.drafters.base import DraftView
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.sequence import TROUBLED_ROUNDS
from gammaray.engine.sim import SimClock, StepCost
from gammaray.types import GenerateRequest, SamplingParams


def drafting(rig: Rig, batch: list[GenerateRequest]) -> None:
    """The batch decodes, and its drafts come from the worker."""
    rig.driver.submit(batch)
    for _ in range(6):
        rig.step()
    assert rig.drafter.drafts > 0


# Faults ----------------------------------------------------------------------------------------------


def dies(rig: Rig) -> None:
    rig.worker.faults.dead = True


def is_stopped(rig: Rig) -> None:
    rig.worker.faults.stopped = True


def is_slow(rig: Rig) -> None:
    rig.worker.faults.slow_s = 0.5


def sends_half_frames(rig: Rig) -> None:
    rig.worker.faults.spoil = lambda frame: [frame[: len(frame) // 2]]


def sends_twice(rig: Rig) -> None:
    rig.worker.faults.spoil = lambda frame: [frame, frame]


def sends_garbage(rig: Rig) -> None:
    rig.worker.faults.spoil = lambda frame: [bytes(reversed(frame))]


def is_of_another_generation(rig: Rig) -> None:
    rig.worker.faults.spoil = lambda frame: [frame[:1] + bytes(4) + b"\x09" + frame[6:]]


def runs_out_of_memory(rig: Rig) -> None:
    drafter = rig.worker.server._drafter
    assert isinstance(drafter, ModelDrafter)

    def forward(rows: object) -> None:
        raise MemoryError

    drafter.runner.forward = forward  # type: ignore[method-assign, assignment]


def falls_behind(rig: Rig) -> None:
    """What it has of each sequence is a few tokens short."""
    lengths = rig.worker.server._lengths
    for key in lengths:
        lengths[key] -= 3


FAULTS = [
    dies,
    is_stopped,
    is_slow,
    sends_half_frames,
    sends_twice,
    sends_garbage,
    is_of_another_generation,
    runs_out_of_memory,
    falls_behind,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_at_most_one_deadline_and_no_token(fault: Callable[[Rig], None]) -> None:
    """Not even beside a worker that is kept waiting for: the rounds after it are plain ones."""
    batch = requests()
    rig = Rig(draft_worker(CLOSE, LEVEL_S))
    drafting(rig, batch)
    fault(rig)
    longest = [rig.step() for _ in range(8)]
    assert max(longest) <= 0.1 + VERIFY_S + 1e-9
    assert sum(longest) <= 8 * VERIFY_S + 3 * 0.1 + 8 * GAMMA * LEVEL_S + 1e-9
    rig.finish()
    assert rig.texts() == plainly(batch)


@pytest.mark.parametrize(("fault", "cause"), [(dies, "worker_lost"), (is_slow, "timeout")])
def test_rounds_without_their_draft_say_why(fault: Callable[[Rig], None], cause: str) -> None:
    rig = Rig(draft_worker(CLOSE, LEVEL_S))
    drafting(rig, requests(tokens=200))
    running = rig.engine.scheduler.running
    assert [one.fallback for one in running] == [None] * 3
    fault(rig)
    for _ in range(TROUBLED_ROUNDS):
        rig.step()
    assert [one.fallback for one in running] == [cause] * 3


@pytest.mark.parametrize("fault", [dies, is_stopped])
def test_a_worker_that_is_lost_costs_one_usual_deadline_then_nothing(fault: Callable[[Rig], None]) -> None:
    rig = Rig(draft_worker(CLOSE, LEVEL_S), overlap=False)
    drafting(rig, requests(tokens=200))
    usual = rig.drafter.link.patience_s
    assert usual == pytest.approx(3 * GAMMA * LEVEL_S)
    fault(rig)
    times = [rig.step() for _ in range(20)]
    assert times[0] == pytest.approx(VERIFY_S + (0 if fault is dies else usual))
    assert times[1:] == pytest.approx([VERIFY_S] * 19)


def test_a_lost_worker_is_used_again_after_catch_up() -> None:
    rig = Rig(draft_worker(CLOSE, LEVEL_S))
    batch = requests(tokens=300)
    drafting(rig, batch)
    rig.worker.faults.dead = True
    rig.step()
    assert not rig.drafter.link.up and rig.drafter.link.losses == 1
    other = draft_worker(CLOSE, LEVEL_S)  # a new process: it knows nothing
    other.clock.advance_to(rig.clock())
    vars(rig.worker).update(vars(other))
    drafted = rig.drafter.drafts
    rig.clock.advance(1.0)
    rig.drafter.keep()
    assert rig.drafter.link.up and rig.drafter.link.generation == 1
    rig.finish()
    assert rig.drafter.drafts > drafted + 10
    assert rig.texts() == plainly(batch)


def test_a_silent_worker_is_given_up_and_connected_again() -> None:
    rig = Rig(draft_worker(CLOSE, LEVEL_S))
    drafting(rig, requests(tokens=300))
    rig.worker.faults.stopped = True
    rig.step()
    for _ in range(30):
        rig.clock.advance(0.1)
        rig.drafter.keep()
    assert not rig.drafter.link.up and rig.drafter.link.losses == 1
    rig.worker.faults.stopped = False
    rig.clock.advance(5.0)
    rig.worker.clock.advance_to(rig.clock())
    rig.drafter.keep()
    assert rig.drafter.link.up


def test_an_idle_link_is_pinged_and_its_death_noticed() -> None:
    rig = Rig(draft_worker(CLOSE, LEVEL_S))
    for _ in range(50):
        rig.clock.advance(0.2)
        rig.worker.clock.advance_to(rig.clock())
        rig.drafter.keep()
    assert rig.drafter.link.up and rig.drafter.link.losses == 0
    rig.worker.faults.stopped = True
    for _ in range(30):
        rig.clock.advance(0.2)
        rig.drafter.keep()
    assert rig.drafter.link.losses == 1


def test_a_worker_that_is_always_too_slow_is_left_alone_for_longer_and_longer() -> None:
    rig = Rig(draft_worker(CLOSE, 0.050), overlap=False)  # four levels: 200 ms
    rig.driver.submit(requests(count=1, tokens=1500))
    rig.finish()
    plain = 1500 * VERIFY_S
    assert rig.drafter.link.late >= 3
    assert rig.clock() < 1.06 * plain


def test_an_answer_taken_in_by_upkeep_is_not_lost() -> None:
    worker, clock = draft_worker(CLOSE, LEVEL_S), SimClock()
    drafter = remote(worker, clock)
    drafter.catch_up("a", [1, 2, 3])
    ticket = drafter.begin([DraftView("a", 3, GAMMA, 1, SamplingParams(temperature=0.0), 0)])
    clock.advance(GAMMA * LEVEL_S)
    drafter.keep()
    assert len(drafter.collect(ticket, clock() + 1)["a"]) == GAMMA


def test_a_worker_that_becomes_slower_but_is_in_time_is_used_on() -> None:
    rig = Rig(draft_worker(CLOSE, LEVEL_S), overlap=False)
    drafting(rig, requests(count=1, tokens=400))
    drafter = rig.worker.server._drafter
    assert isinstance(drafter, ModelDrafter)
    drafter.runner.cost = StepCost(((1_000_000, 0.020),))  # type: ignore[attr-defined]  # 8 -> 80 ms
    drafted = rig.drafter.drafts
    for _ in range(30):
        rig.step()
    assert rig.drafter.drafts > drafted + 10
    assert rig.drafter.link.late <= 3


def test_a_worker_that_is_slow_and_then_sends_garbage_is_left_alone_too() -> None:
    rig = Rig(draft_worker(CLOSE, LEVEL_S))
    rig.driver.submit(requests(count=1, tokens=800))
    rig.worker.faults.slow_s = 0.09
    rig.worker.faults.spoil = lambda frame: [frame if frame[0] == Kind.WELCOME else b"?"]
    rounds = 0.0
    while not rig.engine.idle:
        rounds += rig.step()
        rig.drafter.keep()  # waits on a thread of its own, really
    assert rounds < 1.08 * 800 * VERIFY_S


def test_a_worker_that_floods_is_cut_off() -> None:
    rig = Rig(draft_worker(CLOSE, LEVEL_S))
    drafting(rig, requests(count=1, tokens=100))
    pong = pack_text(Kind.PONG, 0, 0)
    rig.worker.faults.spoil = lambda frame: [pong] * 10_000
    assert sum(rig.step() for _ in range(3)) < 3 * VERIFY_S + 0.1
    assert rig.drafter.link.losses == 1


def test_released_sequences_leave_the_worker() -> None:
    rig = Rig(draft_worker(CLOSE, LEVEL_S))
    rig.driver.submit(requests(tokens=20))
    rig.finish()
    rig.drafter.keep()
    rig.clock.advance(2.0)
    rig.drafter.keep()
    assert rig.worker.server.stats.sequences == 0
    drafter = rig.worker.server._drafter
    assert isinstance(drafter, ModelDrafter)
    assert drafter.cache.pool.used == 0


def test_one_worker_serves_two_replicas_in_one_batch() -> None:
    worker, clock = draft_worker(CLOSE, LEVEL_S), SimClock()
    worker.latency_s = 0.001
    replicas = [remote(worker, clock), remote(worker, clock)]
    for drafter in replicas:
        drafter.catch_up("same id", [1, 2, 3])
    view = DraftView("same id", 3, GAMMA, 1, SamplingParams(temperature=0.0), 0)
    began = clock()
    tickets = [drafter.begin([view]) for drafter in replicas]
    pairs = zip(replicas, tickets, strict=True)
    trees = [drafter.collect(ticket, began + 1)["same id"] for drafter, ticket in pairs]
    assert trees[0] == trees[1]
    assert worker.server.stats.rounds == 1
    assert clock() - began == pytest.approx(GAMMA * LEVEL_S + 2 * worker.latency_s)


# Drafting while the target verifies ------------------------------------------------------------------

TOKENS = 100


def rounds_per_second(
    overlap: bool, noise: float, gamma: int = GAMMA, **kind: object
) -> tuple[float, float, dict[tuple[str, int], list[int]]]:
    """Tokens a simulated second, hit rate, texts."""
    rig = Rig(draft_worker(Dialect(LANGUAGE, noise), LEVEL_S), overlap)
    batch = requests(tokens=TOKENS, **kind)  # type: ignore[arg-type]
    rig.driver.submit(replace(r, plan=replace(r.plan, gamma=gamma)) for r in batch)
    rig.finish()
    stats = rig.worker.server.stats
    return TOKENS * len(batch) / rig.clock(), stats.hits / max(1, stats.drafts), rig.texts()


def test_overlapped_drafting_is_faster_where_it_hits() -> None:
    fast, hits, text = rounds_per_second(overlap=True, noise=0.02)
    slow, none, same = rounds_per_second(overlap=False, noise=0.02)
    assert text == same
    assert hits >= 0.7 and none < hits
    assert fast >= 1.3 * slow


@pytest.mark.parametrize("noise", [0.02, 0.3, 30.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 3])
def test_overlapped_drafting_is_never_slower(noise: float, temperature: float, width: int) -> None:
    kind = {"temperature": temperature, "width": width}
    fast, _, text = rounds_per_second(overlap=True, noise=noise, **kind)
    slow, _, same = rounds_per_second(overlap=False, noise=noise, **kind)
    assert text == same
    assert fast >= 0.98 * slow


def out_of_step(overlap: bool, count: int) -> tuple[float, ServerStats]:
    """Two replicas of one worker, half a round apart: tokens a second of one, and the worker's counts."""
    worker = draft_worker(CLOSE, 0.001)
    sims = []
    for offset in (0.0, 0.020):
        clock = SimClock(offset)
        sims.append(SimEngine(clock, remote(worker, clock)))
        sims[-1].engine.runner.cost = StepCost(((100_000, 0.040),))  # type: ignore[attr-defined]
        sims[-1].driver.submit(requests(count=count, tokens=100))
    if not overlap:
        worker.server.wants_time = lambda: False  # type: ignore[method-assign]
    while busy := [sim for sim in sims if not sim.engine.idle]:
        min(busy, key=lambda sim: sim.clock()).step()
    assert sims[0].texts() == sims[1].texts() == plainly(requests(count=count, tokens=100))
    return 100 * count / sims[0].clock(), worker.server.stats


def test_two_replicas_out_of_step_both_find_their_drafts_ready() -> None:
    fast, stats = out_of_step(overlap=True, count=4)
    slow, _ = out_of_step(overlap=False, count=4)
    assert stats.failures == 0
    assert stats.hits > 0.7 * stats.drafts
    assert fast > 1.03 * slow


def test_one_slow_pass_does_not_end_drafting_ahead() -> None:
    rig = Rig(draft_worker(Dialect(LANGUAGE, 0.02), LEVEL_S))
    whole, rhythm = rig.worker.server.draft_ahead, rig.worker.server._rhythm

    def once() -> None:  # the first pass takes long, as when a model warms up
        rig.worker.server.draft_ahead = whole  # type: ignore[method-assign]
        whole()
        rhythm.passes[0][0] = 0.15

    rig.worker.server.draft_ahead = once  # type: ignore[method-assign]
    rig.driver.submit(requests(count=1, tokens=600))
    rig.finish()
    stats = rig.worker.server.stats
    assert stats.hits > 0.5 * stats.drafts


# State -----------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    faults=st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from(FAULTS), st.integers(1, 5)), min_size=1, max_size=4
    ),
    temperature=st.sampled_from([0.0, 1.0]),
    width=st.integers(1, 3),
    sampled=st.booleans(),
    blocks=st.sampled_from([24, 4096]),
)
def test_any_row_of_faults_leaves_the_text(
    faults: list[tuple[int, Callable[[Rig], None], int]],
    temperature: float,
    width: int,
    sampled: bool,
    blocks: int,
) -> None:
    batch = requests(tokens=50, temperature=temperature, width=width)
    rig = Rig(draft_worker(CLOSE, LEVEL_S, draft_sampling=sampled), blocks=blocks)
    rig.driver.submit(batch)
    for before, fault, lasting in faults:
        for _ in range(before):
            rig.step()
        fault(rig)
        for _ in range(lasting):
            rig.step()
        fresh = draft_worker(CLOSE, LEVEL_S, draft_sampling=sampled)
        fresh.clock.advance_to(rig.clock())
        fresh.clients = rig.worker.clients
        vars(rig.worker).update(vars(fresh))
        rig.clock.advance(0.3)
        rig.drafter.keep()
    rig.finish()
    assert rig.texts() == plainly(batch)
    assert rig.engine.cache.pool.used == 0
