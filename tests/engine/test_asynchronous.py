"""One half of the sequences that speculate drafts while the other is verified: who has its turn, what is
claimed for it, and that whatever happens between the beginning of a draft and its end changes no text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from support.decoding import Driver
from support.lossless import engine, plainly, same
from support.tape import Letters

from gammaray.engine.depth import reserved_slots
from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.engine import Engine
from gammaray.engine.kv import BlockTable, KVCache
from gammaray.engine.scheduler import Schedule, Scheduler
from gammaray.engine.sequence import Sequence as Running
from gammaray.engine.text import OutputText
from gammaray.types import PLAIN, GenerateRequest, PolicySnapshot, SamplingParams, SpeculationPlan

POLICY = PolicySnapshot()
CHAIN = SpeculationPlan("good", 4)


def running(rid: str, plan: SpeculationPlan = CHAIN, prompt: int = 8, max_tokens: int = 100) -> Running:
    request = GenerateRequest(rid, (1,) * prompt, SamplingParams(max_tokens=max_tokens), plan)
    return Running(request, 0, list(request.prompt), OutputText(Letters()), BlockTable())


class Turns:
    """A scheduler, and an engine that accepts no draft."""

    def __init__(self, *sequences: Running, blocks: int = 256, budget: int = 64) -> None:
        cache = KVCache(blocks, 4, prefix_cache=False)
        self.scheduler = Scheduler(cache, max_batch=24, token_budget=budget, asynchronous=True)
        for one in sequences:
            self.scheduler.add(one)
        while not all(one.decoding for one in sequences):
            self.step()

    def step(self, policy: PolicySnapshot = POLICY) -> Schedule:
        schedule = self.scheduler.schedule(policy)
        for part in schedule.slices:
            mine = part.sequence
            computed = mine.table.computed + part.pending
            if part.pending == mine.pending:
                mine.tokens.append(1)
            self.scheduler.cache.commit(mine.table, mine.tokens, computed)
        return schedule


def verified(schedule: Schedule) -> set[str]:
    return {part.sequence.rid[0] for part in schedule.slices if part.depth}


def begun(schedule: Schedule) -> set[str]:
    return {part.sequence.rid[0] for part in schedule.drafting}


def fed(schedule: Schedule) -> set[str]:
    return {part.sequence.rid[0] for part in schedule.slices}


def test_two_halves_take_turns_and_plain_sequences_run_in_every_step() -> None:
    """Catches one side with all of them: then nothing overlaps."""
    turns = Turns(*(running(rid) for rid in "abcd"), *(running(rid, PLAIN) for rid in "xy"))
    for _ in range(3):
        schedule = turns.step()  # whatever happened while they joined
    sides = set[frozenset[str]]()
    for _ in range(6):
        before, schedule = schedule, turns.step()
        assert verified(schedule) == begun(before)
        assert fed(schedule) == verified(schedule) | {"x", "y"}
        assert verified(schedule) | begun(schedule) == set("abcd") and len(begun(schedule)) == 2
        sides.add(frozenset(begun(schedule)))
    assert len(sides) == 2


def test_sides_stay_equal_when_some_leave_and_nobody_waits_for_it() -> None:
    """Catches sides that are fixed when a sequence joins; who changes sides decodes in the meantime."""
    everyone = [running(rid) for rid in "abcdefgh"]
    turns = Turns(*everyone)
    for _ in range(3):
        schedule = turns.step()
    gone = verified(schedule)
    assert len(gone) == 4
    for one in everyone:
        if one.rid[0] in gone:
            turns.scheduler.remove(one)
    turns.step()
    schedule = turns.step()
    assert len(begun(schedule)) == 2 and len(fed(schedule)) == 2
    assert verified(turns.step()) == begun(schedule)


def test_one_alone_drafts_in_one_step_and_is_verified_in_the_next() -> None:
    turns = Turns(running("a"))
    pattern = []
    for _ in range(4):
        schedule = turns.step()
        pattern.append((begun(schedule), verified(schedule)))
    assert pattern == [({"a"}, set()), (set(), {"a"})] * 2


def test_a_draft_has_its_blocks_from_its_beginning_on() -> None:
    """Catches a claim in the step that verifies: a drafter that writes the target's pages would write
    another's."""
    one = running("a", SpeculationPlan("good", 4, 2))
    turns = Turns(one)
    schedule = turns.step()
    assert begun(schedule) == {"a"} and len(one.table.blocks) * 4 >= len(one.tokens) + 8
    held = list(one.table.blocks)
    schedule = turns.scheduler.schedule(POLICY)
    assert verified(schedule) == {"a"} and one.table.blocks == held


def test_the_next_step_feeds_no_more_than_the_budget_whoever_decodes_by_then() -> None:
    """Catches room for drafts that forgets prompts which end meanwhile."""
    turns = Turns(*(running(rid, SpeculationPlan("good", 16)) for rid in "abcd"), budget=40)
    for rid in "efghijklmnopqrstuvwx":
        turns.scheduler.add(running(rid, PLAIN, prompt=1))
    most = 0
    for _ in range(20):
        schedule = turns.step()
        tokens = sum(part.pending + part.depth * part.width for part in schedule.slices)
        nodes = sum(part.depth * part.width for part in schedule.slices)
        assert tokens <= 40 and nodes <= 28
        most = max(most, nodes)
    assert most > 10


def test_a_draft_makes_way_for_plain_decoding() -> None:
    """Catches a draft that is kept while somebody is preempted for want of its blocks."""
    turns = Turns(running("x", PLAIN, prompt=15), running("a", prompt=15), blocks=9)
    assert begun(turns.step()) == {"a"}  # which takes the ninth block
    schedule = turns.step()  # x needs it
    assert (schedule.preempted, schedule.kv_shrunk) == ([], 1)
    assert (fed(schedule), verified(schedule)) == ({"a", "x"}, set())


def test_a_draft_ends_with_its_preemption() -> None:
    """Catches a sequence that is verified when it is back, with nothing to verify and no KV for it."""
    one = running("a")
    turns = Turns(one)
    assert begun(turns.step()) == {"a"}
    turns.scheduler._preempt(one)
    while not one.decoding:
        assert not verified(turns.step())
    schedule = turns.step()
    assert (verified(schedule), begun(schedule)) == (set(), {"a"})


def test_speculation_that_is_off_by_then_is_not_verified() -> None:
    one = running("a")
    turns = Turns(one)
    assert begun(turns.step()) == {"a"}
    schedule = turns.step(PolicySnapshot(version=1, speculation=False))
    assert (fed(schedule), verified(schedule), begun(schedule)) == ({"a"}, set(), set())
    assert turns.scheduler.cache.pool.used == turns.scheduler.cache.blocks_for(len(one.tokens))


# With an engine ---------------------------------------------------------------------------------------


def asked(
    rid: str, drafter: str | None = "good", gamma: int = 4, width: int = 1, seed: int = 3
) -> GenerateRequest:
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True)
    plan = PLAIN if drafter is None else SpeculationPlan(drafter, gamma, width)
    return GenerateRequest(rid, (1, 2, 3, 1, 2), sampling, plan)


def served(batch: Sequence[GenerateRequest], **sizes: int) -> Driver:
    driver = Driver(engine(asynchronous=True, **sizes))  # type: ignore[arg-type]
    driver.submit(batch)
    return driver


def check(driver: Driver, batch: Sequence[GenerateRequest]) -> None:
    driver.finish()
    for request in batch:
        for key, expected in plainly(request).items():
            assert same(driver.outcomes[key], expected), request
    assert driver.engine.cache.pool.used == 0


def under_way(served: Engine) -> list[Running]:
    return [sequence for sequence in served.scheduler if sequence.begun]


@pytest.mark.parametrize("drafter", ["ngram", "good", "sampled", "ahead"])
@pytest.mark.parametrize("width", [1, 3])
def test_drafts_are_really_accepted(drafter: str, width: int) -> None:
    """Equality alone would also hold if every draft were thrown away. A round takes two steps, though."""
    batch = [asked(str(i), drafter, width=width, seed=i) for i in range(3)]
    driver = served(batch)
    check(driver, batch)
    stats = [outcome.stats for outcome in driver.outcomes.values()]
    assert sum(found.accepted for found in stats if found) > 0


EVENTS: Mapping[str, Callable[[Driver, Running], None]] = {
    "abort": lambda driver, one: driver.engine.abort(one.request.request_id),
    "off": lambda driver, one: driver.engine.apply(PolicySnapshot(version=1, speculation=False)),
    "preempted": lambda driver, one: driver.engine._release_draft(driver.engine.scheduler._preempt(one)),
    "lost": lambda driver, one: driver.engine.drafters["good"].release(one.rid),
    "step failed": lambda driver, one: fail_once(driver.engine),
}


def fail_once(served: Engine) -> None:
    forward = served.runner.forward

    def fail(rows: object) -> None:
        served.runner.forward = forward  # type: ignore[method-assign]
        raise RuntimeError("no pass today")

    served.runner.forward = fail  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("event", EVENTS)
def test_what_happens_to_a_sequence_whose_draft_is_under_way(event: str) -> None:
    """Catches a ticket that is taken for a sequence which has ended, or begun again."""
    batch = [asked(str(i), seed=i) for i in range(3)] + [asked("x", None)]
    driver = served(batch)
    while len(found := under_way(driver.engine)) < 2:
        driver.step()
    EVENTS[event](driver, found[-1])
    so_far = len(driver.reports)
    driver.finish()
    assert any(report.verified_nodes for report in driver.reports[so_far:]) == (event != "off")
    for request in batch:
        (expected,) = plainly(request).values()
        ids = driver.outcomes[request.request_id, 0].ids
        whole = event != "abort" or request.request_id != found[-1].request.request_id
        assert ids == (expected.ids if whole else expected.ids[: len(ids)])
    assert driver.engine.cache.pool.used == driver.engine.drafters["good"].inner.cache.pool.used == 0


@pytest.mark.parametrize("fails", ["begin", "collect"])
def test_a_drafter_that_fails_costs_only_speed(fails: str) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no draft today")

    batch = [asked("a", "ngram"), asked("b", "good", seed=4), asked("c", None)]
    driver = served(batch)
    broken = NgramDrafter()
    setattr(broken, fails, fail)
    driver.engine.drafters["ngram"].inner = broken
    check(driver, batch)
    assert sum(report.drafter_failures for report in driver.reports) > 3


class Scribbler:
    """Leaves rubbish in the target's pages, in all slots that are its drafts'. It drafts the wrong thing."""

    vocab_size: int | None = None

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.gone = set[str]()

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views))

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        assert self.engine is not None
        for view in ticket.views:
            if view.rid not in self.gone:
                for slot in range(view.length, view.length + view.nodes):
                    block, offset = divmod(slot, self.engine.cache.block_size)
                    where = view.blocks[block] * self.engine.cache.block_size + offset
                    self.engine.runner.tape[where] = (5, 47)  # type: ignore[attr-defined]
        return {view.rid: DraftTree((0,), (-1,)) for view in ticket.views if view.rid not in self.gone}

    def release(self, rid: str) -> None:
        self.gone.add(rid)

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        self.gone.discard(rid)

    def commit(self, rid: str, tokens: Sequence[int], features: object = None) -> None: ...

    def length(self, rid: str) -> int | None:
        return None


@pytest.mark.parametrize("blocks", [18, 24, 64])
def test_a_drafter_that_writes_the_targets_pages_writes_only_its_own(blocks: int) -> None:
    """Catches pages that another sequence has by the time at which a draft is made."""
    batch = [asked(str(i), "ngram", 6, 2, seed=i) for i in range(4)] + [asked("x", None), asked("y", None)]
    driver = served(batch, blocks=blocks)
    scribbler = driver.engine.drafters["ngram"].inner = Scribbler()
    scribbler.engine = driver.engine
    check(driver, batch)
    assert sum(report.verified_nodes for report in driver.reports) > 20
    assert not any(report.drafter_failures for report in driver.reports)


def test_the_reservation_holds_while_a_draft_is_under_way() -> None:
    driver = served([replace(asked("a", width=8), sampling=SamplingParams(max_tokens=30, ignore_eos=True))])
    seen = 0
    while not driver.engine.idle:
        driver.step()
        for one in under_way(driver.engine):
            seen += 1
            cap = reserved_slots(len(one.tokens), 4)
            assert len(one.table.blocks) <= driver.engine.cache.blocks_for(cap)
    assert seen > 3
