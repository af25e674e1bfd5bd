"""The simulated device, its clock and its drafter: what later tests of time stand on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.decoding import Driver, run
from support.tape import Letters

from gammaray.engine.batch import Row
from gammaray.engine.drafters.base import Drafter, DraftView
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.sim import Language, SimClock, SimDevice, StepCost
from gammaray.engine.sim_drafter import OracleDrafter, Ranks, constant
from gammaray.types import (
    PLAIN,
    GenerateRequest,
    SamplingParams,
    SpeculationPlan,
    SpeculationStats,
    StepReport,
)

VOCAB = 16
LANGUAGE = Language(VOCAB, max_model_len=6000, seed=1)
COST = StepCost(((1, 1 / 64), (1025, 1 / 64 + 1)))  # powers of two: sums of them are exact
LEVEL_S = 1 / 128
FREE = StepCost(((10_000, 0.0),))
ALWAYS, NEVER = constant(1.0), constant(0.0)


def device(
    clock: SimClock | None = None, blocks: int = 64, cost: StepCost = FREE, block_size: int = 4
) -> SimDevice:
    return SimDevice(LANGUAGE, clock or SimClock(), cost, blocks, block_size)


def engine(ranks: Ranks = ALWAYS, cost: StepCost = COST, **changes: int) -> Engine:
    settings = {
        "blocks": 64,
        "block_size": 4,
        "max_batch": 16,
        "token_budget": 256,
        "oracle": False,
        **changes,
    }
    clock = SimClock()
    target = device(clock, settings.pop("blocks"), cost, settings.pop("block_size"))
    drafters: dict[str, Drafter] = {
        "sim": OracleDrafter(LANGUAGE, clock, ranks, LEVEL_S, seed=5),
        "model": ModelDrafter(device(blocks=256)),
    }
    options = EngineOptions(**settings)  # type: ignore[arg-type]
    return Engine(target, Letters(), (), drafters, options, clock)


def request(
    rid: int, gamma: int = 4, width: int = 1, drafter: str = "sim", **sampling: object
) -> GenerateRequest:
    settings = {"temperature": 0.0, "max_tokens": 40, "seed": rid, "ignore_eos": True, **sampling}
    return GenerateRequest(
        str(rid),
        tuple((rid * 5 + i * i) % VOCAB for i in range(9)),
        SamplingParams(**settings),  # type: ignore[arg-type]
        SpeculationPlan(drafter, gamma, width),
        tenant=f"tenant {rid}",
    )


def stats(reports: Sequence[StepReport]) -> SpeculationStats:
    return sum((counts.stats for report in reports for counts in report.counts), SpeculationStats())


# The clock and the table ------------------------------------------------------------------------------


def test_time_passes_only_forward() -> None:
    clock = SimClock(2.0)
    clock.advance(0.5)
    clock.advance_to(1.0)
    assert clock() == 2.5
    clock.advance_to(4.0)
    assert clock() == 4.0
    for wrong in (-0.1, math.nan):
        with pytest.raises(ValueError, match="duration"):
            clock.advance(wrong)
    assert clock() == 4.0


@pytest.mark.parametrize(
    ("tokens", "linear", "stepped"),
    [(1, 2.0, 2.0), (4, 2.0, 2.0), (5, 2.5, 6.0), (12, 6.0, 6.0), (16, 6.0, 6.0)],
)
def test_a_step_costs_what_the_table_says(tokens: int, linear: float, stepped: float) -> None:
    points = ((4, 2.0), (12, 6.0), (16, 6.0))
    assert StepCost(points).seconds(tokens) == linear
    assert StepCost(points, stepped=True).seconds(tokens) == stepped
    assert StepCost(points).sps(tokens) == 1 / linear


@pytest.mark.parametrize("points", [(), ((4, 2.0), (4, 3.0)), ((4, 2.0), (8, 1.0)), ((1, -1.0),)])
def test_a_table_that_makes_no_sense_is_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        StepCost(points)


def test_a_step_beyond_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="add a point for 17"):
        StepCost(((16, 1.0),)).seconds(17)


# The device -------------------------------------------------------------------------------------------

tokens = st.integers(0, VOCAB - 1)


@given(st.lists(tokens, min_size=1, max_size=12), st.data())
def test_a_tree_read_through_its_pages_is_each_path_alone(context: list[int], data: st.DataObject) -> None:
    """Also when the tree is fed in two passes, as a drafter model grows it."""
    nodes = data.draw(st.lists(tokens, min_size=1, max_size=8))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(len(nodes))]
    fed = data.draw(st.integers(0, len(nodes) - 1))
    blocks = data.draw(st.permutations(range(6)))
    runner = device(blocks=6)
    before = runner.forward([Row(context, 0, blocks, nodes[:fed], parents[:fed], logits=len(context))])
    if fed:
        after = runner.forward([Row((), len(context), blocks, nodes, parents, fed)])
    else:
        after = runner.forward([Row(context, 0, blocks, nodes, parents)])[1:]
    assert before[: len(context)].equal(runner.dense(context)[0])
    found = [*before[len(context) :], *after]
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else context), nodes[node]])
        assert found[node].equal(runner.dense(paths[node])[0][-1])


def test_any_other_token_anywhere_changes_what_follows() -> None:
    context = [3, 1, 4, 1, 5, 9, 2, 6]
    expected = LANGUAGE.logits([LANGUAGE.extend(0, 0, context)])
    for at in range(len(context)):
        changed = [*context]
        changed[at] = 0
        assert not LANGUAGE.logits([LANGUAGE.extend(0, 0, changed)]).equal(expected)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([Row([6], 6, [0, 1])], "slot 5, read for position 5, was never written"),
        ([Row([6], 5, [1, 0])], "slot 4, read for position 0, holds position 4"),  # blocks in the wrong order
        ([Row([6], 5, [0, 1]), Row([7], 5, [0, 1])], "one slot"),
    ],
)
def test_wrong_bookkeeping_is_an_error(rows: list[Row], complaint: str) -> None:
    runner = device(blocks=4)
    runner.forward([Row([1, 2, 3, 4, 5], 0, [0, 1])])
    with pytest.raises(RuntimeError, match=complaint):
        runner.forward(rows)


def test_kv_that_moved_to_another_position_is_an_error() -> None:
    runner = device(blocks=4)
    runner.forward([Row([1, 2, 3, 4, 5], 0, [0, 1])])
    runner.move([4, 1], [2, 4])  # overlapping: read before either is written
    assert [kv.flatten().tolist() for kv in runner.read_kv([2, 4])[0]] == [[5, 2], [4, 1]]
    with pytest.raises(RuntimeError, match="slot 2, read for position 2, holds position 4"):
        runner.forward([Row([7], 5, [0, 1])])


# The drafter's protocol -------------------------------------------------------------------------------


def drafts(drafter: OracleDrafter, length: int, width: int = 1) -> list[tuple[int, ...]]:
    view = DraftView("r", length, depth=3, width=width, sampling=SamplingParams(temperature=0.0), sequence=0)
    return [tree.tokens for tree in drafter.collect(drafter.begin([view]), 0.0).values()]


def test_a_drafter_that_is_not_where_the_sequence_is_leaves_it_out() -> None:
    clock = SimClock()
    drafter = OracleDrafter(LANGUAGE, clock, ALWAYS, LEVEL_S)
    assert drafts(drafter, 3) == []
    drafter.catch_up("r", [1, 2, 3])
    (ahead,) = drafts(drafter, 3)
    assert clock() == 3 * LEVEL_S
    assert drafts(drafter, 4) == []  # the target is a token ahead
    drafter.commit("r", ahead[:2])
    assert drafter.length("r") == 5
    assert drafts(drafter, 5)[0][0] == ahead[2]
    drafter.commit("other", [1])
    drafter.release("r")
    assert (drafter.length("r"), drafter.length("other"), drafts(drafter, 5)) == (None, None, [])


def test_nothing_is_drafted_past_the_end_of_the_language() -> None:
    drafter = OracleDrafter(LANGUAGE, SimClock(), ALWAYS)
    for length, found in ((LANGUAGE.max_model_len - 3, 1), (LANGUAGE.max_model_len - 2, 0)):
        drafter.catch_up("r", [1] * length)
        assert len(drafts(drafter, length)) == found


# The engine on it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", ["sim", "model"])
@pytest.mark.parametrize(("gamma", "width"), [(1, 1), (5, 1), (3, 3)])
def test_speculative_text_is_plain_text(temperature: float, drafter: str, gamma: int, width: int) -> None:
    batch = [request(i, gamma, width, drafter, temperature=temperature, top_p=0.9) for i in range(5)]
    driver = Driver(engine(constant(0.6, 0.2), blocks=48, oracle=True))
    driver.submit(batch)
    driver.finish()
    plain = run(engine(blocks=256), [replace(each, plan=PLAIN) for each in batch])
    assert {key: o.ids for key, o in driver.outcomes.items()} == {key: o.ids for key, o in plain.items()}
    assert stats(driver.reports).accepted > 0 and sum(r.preempted for r in driver.reports) > 0


def endless(
    ranks: Ranks, steps: int, gamma: int = 4, width: int = 1, temperature: float = 0.0
) -> list[StepReport]:
    """16 sequences that never end."""
    served = engine(ranks, blocks=6000, block_size=16)
    for rid in range(16):
        served.submit(request(rid, gamma, width, max_tokens=5900, temperature=temperature))
    return [served.step().report for _ in range(steps)]


def expected_tau(alpha: float, gamma: int) -> tuple[float, float]:
    """Mean and standard deviation of a round's tokens under independent acceptance (math.md section 2)."""
    chances = [alpha**k * (1 - alpha) for k in range(gamma)] + [alpha**gamma]
    mean = sum(chance * (k + 1) for k, chance in enumerate(chances))
    assert mean == pytest.approx(gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha))
    return mean, math.sqrt(sum(chance * (k + 1 - mean) ** 2 for k, chance in enumerate(chances)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("alpha", "gamma"), [(0.0, 3), (0.3, 2), (0.7, 4), (0.9, 8), (1.0, 5)])
def test_acceptance_is_what_was_set(alpha: float, gamma: int, temperature: float) -> None:
    found = stats(endless(constant(alpha), 80, gamma, temperature=temperature))
    assert found.alpha is not None and found.tau is not None
    assert abs(found.alpha - alpha) <= 4 * math.sqrt(alpha * (1 - alpha) / found.tested)
    mean, deviation = expected_tau(alpha, gamma)
    assert abs(found.tau - mean) <= 4 * deviation / math.sqrt(found.rounds) + 1e-12
    assert found.drafted == gamma * found.rounds


def test_siblings_take_the_share_that_was_set_for_their_rank() -> None:
    ranks = (0.5, 0.3, 0.15)
    for width in (1, 2, 3):
        found = stats(endless(constant(*ranks), 150, 3, width))
        assert found.alpha == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / found.tested))
        mean, deviation = expected_tau(sum(ranks[:width]), 3)
        assert found.tau == pytest.approx(mean, abs=4 * deviation / math.sqrt(found.rounds))


def test_acceptance_may_collapse_for_one_tenant_at_a_time() -> None:
    def ranks(salt: bytes, now: float) -> Sequence[float]:
        return (0.0,) if salt == b"tenant 3" and now >= 2.0 else (1.0,)

    now, fell = 0.0, {"before": SpeculationStats(), "after": SpeculationStats()}
    for report in endless(ranks, 60):
        for counts in report.counts:
            if counts.tenant == "tenant 3":
                fell["before" if now < 2.0 else "after"] += counts.stats
            else:
                assert counts.stats.accepted == counts.stats.drafted
        now += report.draft_s + report.verify_s
    assert (fell["before"].alpha, fell["after"].alpha) == (1.0, 0.0)


def test_simulated_time_is_the_sum_of_the_table() -> None:
    served = engine(constant(0.6), blocks=400)
    driver = Driver(served)
    driver.submit([request(rid, gamma=rid % 4, width=1 + rid % 2) for rid in range(8)])
    driver.finish()
    total = 0.0
    for report in driver.reports:
        fed = report.prefill_tokens + report.verified_nodes + sum(c.stats.rounds for c in report.counts)
        levels = max((c.stats.drafted // (1 + int(c.tenant[-1]) % 2) for c in report.counts), default=0)
        assert (report.draft_s, report.verify_s) == (levels * LEVEL_S, COST.seconds(fed))
        assert (report.schedule_s, report.commit_s) == (0.0, 0.0)
        total += levels * LEVEL_S + COST.seconds(fed)
    clock: Callable[[], float] = served.runner.clock  # type: ignore[attr-defined]
    assert clock() == total > 0


def test_a_run_repeats_and_a_thousand_steps_take_seconds(
    record_property: Callable[[str, object], None],
) -> None:
    began = time.perf_counter()
    first = endless(constant(0.7), 1000)
    record_property("wall_s_of_1000_steps", time.perf_counter() - began)
    assert first[-1].running == 16
    assert endless(constant(0.7), 100) == first[:100]
