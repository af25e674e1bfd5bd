"""A noisy tenant takes neither another's turn, nor its drafts, nor its KV."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tape import Letters

from gammaray.engine.fairness import Service, share_room
from gammaray.engine.kv import BlockTable, KVCache
from gammaray.engine.scheduler import PATIENCE, Scheduler
from gammaray.engine.sequence import Sequence
from gammaray.engine.text import OutputText
from gammaray.types import PLAIN, GenerateRequest, PolicySnapshot, SamplingParams, SpeculationPlan

names = st.sampled_from("abcdef")


@given(
    st.dictionaries(names, st.integers(0, 100), min_size=1),
    st.dictionaries(names, st.floats(0.1, 10)),
    st.integers(0, 300),
)
def test_room_is_shared_max_min(wants: dict[str, int], weights: dict[str, float], room: int) -> None:
    shares = share_room(wants, weights, room)
    assert shares.keys() == wants.keys()
    assert all(0 <= shares[tenant] <= wants[tenant] for tenant in wants)
    assert sum(shares.values()) <= room or sum(wants.values()) <= room
    if sum(wants.values()) <= room:
        assert shares == wants
    level = ideal_level(wants, weights, room)
    for tenant, want in wants.items():
        ideal = min(want, level * weights.get(tenant, 1.0))
        assert abs(shares[tenant] - ideal) <= len(wants)  # whole nodes: each step rounds down once


def ideal_level(wants: dict[str, int], weights: dict[str, float], room: int) -> float:
    """Where water of the volume `room` stands in vessels of these widths and heights, by bisection."""
    low, high = 0.0, 10_000.0
    for _ in range(80):
        middle = (low + high) / 2
        volume = sum(min(want, middle * weights.get(t, 1.0)) for t, want in wants.items())
        low, high = (middle, high) if volume < room else (low, middle)
    return high


def test_the_least_served_is_next_and_a_pause_earns_nothing() -> None:
    service = Service()
    service.enter("a", ())
    service.charge("a", 100, 1.0)
    service.enter("b", {"a"})
    assert service.order(["a", "b"]) == ["a", "b"]  # it begins where the other is
    service.charge("a", 10, 1.0)
    service.charge("b", 15, 2.0)
    assert service.order(["a", "b"]) == ["b", "a"]


def sequence(
    name: str,
    tenant: str,
    prompt: int,
    plan: SpeculationPlan = PLAIN,
    max_tokens: int = 50,
    priority: int = 0,
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    request = GenerateRequest(
        name, tuple(range(1, prompt + 1)), params, plan, tenant=tenant, priority=priority
    )
    return Sequence(
        request, 0, list(request.prompt), OutputText(Letters(), ()), BlockTable(salt=tenant.encode())
    )


def scheduler(blocks: int = 64, max_batch: int = 4, budget: int = 16) -> Scheduler:
    return Scheduler(KVCache(blocks, 4, prefix_cache=False), max_batch, budget)


def admitted(target: Scheduler, policy: PolicySnapshot, count: int) -> list[str]:
    """Tenants in the order in which their sequences begin; each ends as soon as its prompt is computed."""
    order: list[str] = []
    for _ in range(10 * count):
        for part in target.schedule(policy).slices:
            one = part.sequence
            if one.table.computed == 0:
                order.append(one.request.tenant)
            target.cache.commit(one.table, one.tokens, one.table.computed + part.pending)
            if not one.pending:
                target.remove(one)
        if len(order) >= count:
            break
    return order


@pytest.mark.parametrize(("weight", "expected"), [(1.0, 5), (3.0, 7)])
def test_turns_follow_the_weights(weight: float, expected: int) -> None:
    target = scheduler(max_batch=1)
    for number in range(20):
        for tenant in ("loud", "quiet"):
            target.add(sequence(f"{tenant}{number}", tenant, 8))
    turns = admitted(target, PolicySnapshot(weights={"loud": weight}), 10)
    assert turns[:10].count("loud") in (expected, expected + 1)


def test_long_prompts_pay_for_their_length() -> None:
    """By turns alone the tenant with long prompts would get most of the engine."""
    target = scheduler(blocks=256, max_batch=1, budget=64)
    for number in range(20):
        target.add(sequence(f"l{number}", "long", 60))
        target.add(sequence(f"s{number}", "short", 6))
    turns = admitted(target, PolicySnapshot(), 11)
    assert turns.count("short") >= 8


def running(target: Scheduler, *sequences: Sequence) -> None:
    for one in sequences:
        target.add(one)
    for _ in range(20):
        for part in target.schedule(PolicySnapshot()).slices:
            target.cache.commit(
                part.sequence.table, part.sequence.tokens, part.sequence.table.computed + part.pending
            )
            if not part.sequence.pending:
                part.sequence.tokens.append(1)


def test_a_crowd_of_drafts_leaves_the_other_tenant_its_own() -> None:
    target = scheduler(blocks=256, max_batch=12, budget=60)
    plan = SpeculationPlan("x", 8)
    crowd = [sequence(f"c{i}", "loud", 4, plan) for i in range(9)]
    quiet = sequence("q", "quiet", 4, plan)
    running(target, *crowd, quiet)
    depths = {part.sequence: part.depth for part in target.schedule(PolicySnapshot()).slices}
    assert depths[quiet] == 8
    assert {depths[one] for one in crowd} == {3}  # 42 nodes, of which the quiet one takes 8


def test_a_tenant_keeps_to_its_share_of_kv_while_another_waits() -> None:
    target = scheduler(blocks=20, max_batch=8, budget=64)
    policy = PolicySnapshot(kv_shares={"loud": 0.5})
    for number in range(6):
        target.add(sequence(f"l{number}", "loud", 15))  # 4 blocks each
    target.schedule(policy)  # nobody else waits
    assert len(target.running) == 4
    for one in target.running[2:]:
        target.remove(one)
    target.add(sequence("q", "quiet", 46))  # 12 blocks, and one for each that runs: not yet
    target.schedule(policy)
    assert len(target.running) == 2
    target.schedule(PolicySnapshot())  # without a share the loud one would take the room at once
    assert len(target.running) > 2


@pytest.mark.parametrize(("weight", "victim"), [(1.0, "l1"), (10.0, "q")])
def test_who_holds_the_most_kv_for_its_weight_makes_way(weight: float, victim: str) -> None:
    """Not whoever came last; of one tenant the least urgent, and of those the newest."""
    target = scheduler(blocks=15, max_batch=8, budget=64)
    loud, quiet = (
        [sequence(f"l{i}", "loud", 11, priority=int(i < 2)) for i in range(3)],
        sequence("q", "quiet", 7),
    )
    for newcomers in (loud[:2], loud[2:], [quiet]):
        for one in newcomers:
            target.add(one)
        for part in target.schedule(PolicySnapshot()).slices:
            target.cache.commit(part.sequence.table, part.sequence.tokens, part.pending)
    for one in (*loud, quiet):
        one.tokens += [1] * 6
        one.table.computed = len(one.tokens) - 1  # 17 tokens take 5 blocks, 13 take 4
    assert target.running[-1] is quiet
    preempted = target.schedule(PolicySnapshot(weights={"loud": weight})).preempted
    assert preempted[0].request.request_id == victim


def test_drafts_count_as_service() -> None:
    target = scheduler(blocks=64, budget=32)
    drafting, plain = sequence("d", "drafting", 4, SpeculationPlan("x", 4)), sequence("p", "plain", 4)
    running(target, drafting, plain)
    assert target._service.order(["drafting", "plain"]) == ["plain", "drafting"]


def test_a_tiny_weight_is_no_division_by_zero() -> None:
    """1 + 1e-20 - 1 is 0."""
    assert share_room({"a": 10, "b": 10}, {"a": 1e-20, "b": 1.0}, 15) == {"a": 5, "b": 10}


def served(target: Scheduler, stream: Sequence) -> list[str]:
    """A step; what runs beside `stream` ends with its fourth token. Tenants of the sequences that began."""
    before = list(target.running)
    slices = target.schedule(PolicySnapshot()).slices
    for one, fed in [(part.sequence, part.pending) for part in slices]:
        target.cache.commit(one.table, one.tokens, one.table.computed + fed)
        if not one.pending:
            one.tokens.append(1)
        if one is not stream and one.generated == 4:
            target.remove(one)
    return [part.sequence.request.tenant for part in slices if part.sequence not in before]


@pytest.mark.parametrize("busy", [1, 8])
def test_a_tenant_of_which_nothing_waits_earns_no_credit(busy: int) -> None:
    """Else a long stream would entitle it to a burst that starves the others for as long; so it would where
    nobody waits, and another one merely uses what is free."""
    target = scheduler(blocks=512)
    stream = sequence("s", "patient", 4)
    target.add(stream)
    begun: list[str] = []
    for step in range(360):
        if step == 300:
            begun.clear()
            for number in range(100):
                target.add(sequence(f"p{number}", "patient", 8))
        wanted = busy if step < 300 else 8
        for _ in range(wanted - sum(one.request.tenant == "busy" for one in target)):
            target.add(sequence("b", "busy", 8))
        begun += served(target, stream)
    assert 7 <= begun[:20].count("busy") <= 12


def test_nobody_waits_for_a_tenant_that_is_over_its_share_however_long_that_waits() -> None:
    target = scheduler(blocks=40, max_batch=8, budget=64)
    policy = PolicySnapshot(kv_shares={"loud": 0.5})
    target.add(sequence("l", "loud", 30))
    target.schedule(policy)
    large = sequence("large", "loud", 60)
    large.overtaken = PATIENCE
    small = sequence("q", "quiet", 4)
    target.add(large)
    target.add(small)
    target.schedule(policy)
    assert small in target.running and large in target.running  # alone, it may have more than its share
