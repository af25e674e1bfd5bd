"""Who gets tokens and blocks: every claim and every limit on its own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from support.tape import Letters

from gammaray.engine.breaker import Trial
from gammaray.engine.depth import allowed_shape, reserved_slots, share_depth
from gammaray.engine.kv import BlockTable, KVCache
from gammaray.engine.scheduler import PATIENCE, Schedule, Scheduler
from gammaray.engine.sequence import Sequence, State
from gammaray.engine.text import OutputText
from gammaray.types import (
    PLAIN,
    Forecast,
    GenerateRequest,
    KeyPolicy,
    PolicySnapshot,
    SamplingParams,
    SpeculationPlan,
)

BLOCK = 4
POLICY = PolicySnapshot()


def sequence(
    rid: str, prompt: int, tenant: str = "a", max_tokens: int = 100, plan: SpeculationPlan = PLAIN
) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens)
    request = GenerateRequest(rid, (1,) * prompt, sampling, plan, tenant=tenant)
    return Sequence(request, 0, list(request.prompt), OutputText(Letters()), BlockTable())


def scheduler(blocks: int = 64, max_batch: int = 8, budget: int = 64) -> Scheduler:
    return Scheduler(KVCache(blocks, BLOCK, prefix_cache=False), max_batch, budget)


def commit(target: Scheduler, schedule: Schedule) -> None:
    """What the engine does after a step: one token for everyone who reached the end of its tokens."""
    for part in schedule.slices:
        mine = part.sequence
        computed = mine.table.computed + part.pending
        if part.pending == mine.pending:
            mine.tokens.append(1)
        target.cache.commit(mine.table, mine.tokens, computed)


def decoding(target: Scheduler, *sequences: Sequence) -> None:
    for one in sequences:
        target.add(one)
    while not all(one.decoding for one in sequences):
        commit(target, target.schedule(POLICY))


def part_of(schedule: Schedule, one: Sequence) -> tuple[int, int, int]:
    (part,) = [p for p in schedule.slices if p.sequence is one]
    return part.pending, part.depth, part.width


def test_decoding_comes_first_then_drafts_then_prompts() -> None:
    target = scheduler(budget=20)
    plain, drafting = sequence("p", 4), sequence("d", 8, plan=SpeculationPlan("x", 6, 1))
    decoding(target, plain, drafting)
    prompt = sequence("new", 40)
    target.add(prompt)
    schedule = target.schedule(POLICY)
    assert part_of(schedule, plain) == (1, 0, 1)
    assert part_of(schedule, drafting) == (1, 6, 1)
    assert part_of(schedule, prompt) == (12, 0, 1)


def test_drafts_take_at_most_70_percent_and_leave_a_quarter_to_prompts_that_wait() -> None:
    target = scheduler(budget=20)
    drafting = [sequence(str(i), 8, plan=SpeculationPlan("x", 6, 1)) for i in range(4)]
    decoding(target, *drafting)

    def drafted() -> int:
        return sum(part.depth for part in target.schedule(POLICY).slices)

    assert drafted() == 12  # 14 is 70 %, and depths are equal
    target.add(sequence("new", 40))
    assert drafted() == 8  # 20 - 4 - 5


def test_the_common_cap_on_depth_leaves_short_drafts_whole() -> None:
    assert share_depth([(2, 1), (8, 1)], room=7) == [2, 5]
    assert share_depth([(2, 4), (8, 1)], room=9) == [1, 1]
    assert share_depth([(2, 4)], room=3) == [0]
    assert share_depth([], room=0) == []


@pytest.mark.parametrize(
    "left, limit, expected", [(10, None, 6), (4, None, 3), (1, None, 0), (10, 2, 2), (10, 0, 0)]
)
def test_depth_is_the_least_of_its_limits(left: int, limit: int | None, expected: int) -> None:
    one = sequence("r", 4, max_tokens=left, plan=SpeculationPlan("x", 6))
    keys = {} if limit is None else {("a", "default", "x"): KeyPolicy(gamma=limit)}
    assert allowed_shape(one, PolicySnapshot(keys=keys))[0] == expected


@pytest.mark.parametrize(
    ("temperature", "alpha", "adaptive", "expected"),
    [(0.8, None, True, 6), (0.9, None, True, 1), (0.9, 0.5, True, 6), (0.9, None, False, 6)],
)
def test_a_hot_request_of_which_nothing_is_known_begins_with_one_level(
    temperature: float, alpha: float | None, adaptive: bool, expected: int
) -> None:
    plan = SpeculationPlan("x", 6, adaptive=adaptive)
    one = sequence("r", 4, plan=plan)
    sampling = replace(one.request.sampling, temperature=temperature)
    one.request = replace(one.request, sampling=sampling, forecast=Forecast(alpha=alpha))
    assert allowed_shape(one, POLICY)[0] == expected


@pytest.mark.parametrize(
    ("accepted", "extra_s", "adaptive", "expected"),
    [(16, 0.1, True, 6), (8, 0.1, True, 4), (4, 0.1, True, 2), (4, 0.1, False, 6), (4, 0.9, True, 0)],
)
def test_the_last_16_rounds_are_one_of_its_limits(
    accepted: int, extra_s: float, adaptive: bool, expected: int
) -> None:
    """0: little was accepted, and it cost more than it saved."""
    one = sequence("r", 4, plan=SpeculationPlan("x", 6, adaptive=adaptive))
    one.request = replace(one.request, forecast=Forecast(alpha=0.5))
    for number in range(16):
        took = int(number < accepted)
        one.breaker.add(Trial(1, took, 1 + took, 1.0, extra_s))
    assert allowed_shape(one, POLICY)[0] == expected


def test_a_tree_keeps_to_its_reservation() -> None:
    assert reserved_slots(context=9, gamma=4) == 21
    target = scheduler()
    one = sequence("r", 8, plan=SpeculationPlan("x", 4, 8))
    decoding(target, one)
    depth, width = part_of(target.schedule(POLICY), one)[1:]
    assert (depth, width) == (4, 3)  # 9 + 4 x 3 slots


def test_for_want_of_blocks_a_tree_narrows_to_a_chain_and_then_to_nothing() -> None:
    shapes = []
    for blocks in (16, 15, 14, 13):
        target = scheduler(blocks=blocks)
        one = sequence("r", 51, plan=SpeculationPlan("x", 4, 3))
        decoding(target, one)
        schedule = target.schedule(POLICY)
        shapes.append((*part_of(schedule, one)[1:], schedule.kv_shrunk))
    assert shapes == [(4, 3, 0), (4, 2, 1), (4, 1, 1), (0, 1, 1)]


def test_a_chain_that_is_too_long_becomes_shorter() -> None:
    target = scheduler(blocks=14)
    one = sequence("r", 51, plan=SpeculationPlan("x", 6, 2))
    decoding(target, one)
    assert part_of(target.schedule(POLICY), one) == (1, 4, 1)


def test_a_prompt_gets_its_blocks_before_drafts_do() -> None:
    target = scheduler(blocks=20)
    drafting = sequence("d", 31, plan=SpeculationPlan("x", 8, 4))
    decoding(target, drafting)
    prompt = sequence("new", 40)
    target.add(prompt)
    schedule = target.schedule(POLICY)
    assert prompt.state is State.RUNNING
    assert part_of(schedule, drafting) == (1, 8, 1)  # the two blocks that are left
    assert schedule.kv_shrunk == 1


def test_a_prompt_is_admitted_only_with_a_block_to_spare_for_each_that_runs() -> None:
    target = scheduler(blocks=10)
    decoding(target, sequence("a", 3), sequence("b", 3))
    waiting = sequence("new", 28)
    target.add(waiting)
    target.schedule(POLICY)
    assert waiting.state is State.WAITING  # 7 blocks + 2 to spare of 8


def test_the_newest_makes_way_and_is_first_in_its_queue() -> None:
    target = scheduler(blocks=5)
    old, new = sequence("old", 7), sequence("new", 6)
    decoding(target, old, new)
    later = sequence("later", 4)
    target.add(later)
    while new.state is State.RUNNING:
        schedule = target.schedule(POLICY)
        commit(target, schedule)
    assert schedule.preempted == [new]
    assert old.state is State.RUNNING
    assert [s.request.request_id for s in target] == ["old", "new", "later"]
    assert (new.table.blocks, new.table.computed, new.preemptions) == ([], 0, 1)


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    target = scheduler(blocks=5)
    old, new = sequence("old", 7), sequence("new", 8)
    decoding(target, old, new)
    target.add(sequence("later", 1, tenant="b"))
    while not (schedule := target.schedule(POLICY)).preempted:
        commit(target, schedule)
    assert [part.sequence for part in schedule.slices] == [old]


def serve_until(target: Scheduler, wanted: Sequence, rivals: Seq[str], limit: int) -> int:
    """Admissions of rivals, each of which runs for a few steps, until `wanted` runs."""
    admitted = 0
    while wanted.state is State.WAITING:
        assert admitted < limit
        while sum(s.request.tenant in rivals for s in target) < 3:
            target.add(sequence(f"r{admitted}", 3, tenant=rivals[admitted % len(rivals)]))
            admitted += 1
        commit(target, target.schedule(POLICY))
        for one in list(target.running):
            if one.generated > 4:
                target.remove(one)
    return admitted


def test_small_prompts_of_others_cannot_keep_a_large_one_waiting_for_ever() -> None:
    target = scheduler(blocks=16)
    serve_until(target, big(target), ["b"], limit=3 * PATIENCE)


def test_nor_can_several_tenants() -> None:
    target = scheduler(blocks=16)
    serve_until(target, big(target), ["b", "c", "d"], limit=3 * PATIENCE)


def big(target: Scheduler) -> Sequence:
    for i in range(3):
        decoding(target, sequence(f"first{i}", 3, tenant="b"))
    one = sequence("big", 60, tenant="a")
    target.add(one)
    return one


def test_tenants_that_do_not_wait_are_forgotten() -> None:
    target = scheduler()
    for i in range(50):
        one = sequence("r", 3, tenant=f"t{i}")
        decoding(target, one)
        target.remove(one)
    aborted = sequence("r", 3, tenant="gone")
    target.add(aborted)
    target.remove(aborted)
    assert (target.waiting, len(target._waiting), target.cache.pool.used) == (0, 0, 0)


def test_prompts_that_run_share_what_is_left() -> None:
    target = scheduler(budget=10)
    first, second = sequence("1", 12), sequence("2", 12)
    target.add(first)
    target.add(second)
    steps = [[(p.sequence.request.request_id, p.pending) for p in advance(target).slices] for _ in range(3)]
    assert steps[:2] == [[("1", 10)], [("1", 2), ("2", 8)]]
    assert steps[2] == [("1", 1), ("2", 4)]


def advance(target: Scheduler) -> Schedule:
    schedule = target.schedule(POLICY)
    commit(target, schedule)
    return schedule
