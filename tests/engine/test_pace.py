"""When a sequence drafts, what a drafter's confidence is worth, and what surveys are for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.decoding import Driver
from support.tape import Letters

from gammaray.engine.calibration import Calibration, Knowledge, Rates, monotone
from gammaray.engine.drafters.base import DraftTree
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.pace import LONGEST_REST, SURVEY, Pace
from gammaray.engine.sim import Language, SimClock, SimDevice, StepCost
from gammaray.engine.sim_drafter import OracleDrafter, constant
from gammaray.engine.verifier import Verdict
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan, SpeculationStats

LANGUAGE = Language(16, max_model_len=2000, seed=3)
STEEP = StepCost(((1, 0.010), (257, 0.090)))  # a token costs 3 % of a step


def test_a_sequence_whose_drafts_are_worth_nothing_rests_longer_and_longer_and_with_others() -> None:
    pace, drafted = Pace(), []
    for step in range(400):
        if not pace.rest:
            drafted.append(step)
            pace.trimmed(False, step)
        pace.end_round()
    assert drafted[:4] == [0, 1, 2, 3]
    gaps = np.diff(drafted[3:]).tolist()
    assert all(rest < gap <= 2 * rest for gap, rest in zip(gaps, (8, 16, 32, 64, 64), strict=False))
    assert not any(step % 8 for step in drafted[4:]) and max(gaps) <= 2 * LONGEST_REST
    pace.trimmed(True, 400)
    assert pace.idle == 0


def test_one_draft_in_sixteen_is_a_survey_and_not_all_sequences_at_once() -> None:
    rounds = []
    for rid in range(64):
        pace = Pace()
        rounds.append([pace.survey(f"request-{rid}/0", cheap=False) for _ in range(3 * SURVEY)])
    assert all(sum(one) == 3 for one in rounds)
    assert max(map(sum, zip(*rounds, strict=True))) < 16


@pytest.mark.parametrize("cheap", [False, True])
def test_after_a_rest_a_draft_is_verified_whole_where_there_is_room(cheap: bool) -> None:
    """The bug: a drafter that is poor at first, as it learns from the text, is never tested again."""
    pace = Pace()
    surveys = []
    for step in range(100):
        if not pace.rest:
            surveys.append(pace.survey("a/0", cheap))
            if not surveys[-1]:
                pace.trimmed(False, step)
        pace.end_round()
    assert surveys[:7] == [False] * 4 + [cheap, False, cheap]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 9)), min_size=1, max_size=16))
def test_the_curve_rises_and_keeps_the_mean(pairs: list[tuple[float, float]]) -> None:
    values, weights = zip(*pairs, strict=True)
    found = monotone(values, weights)
    assert all(a <= b + 1e-12 for a, b in pairwise(found))
    assert np.dot(found, weights) == pytest.approx(np.dot(values, weights))


def test_an_overconfident_drafter_is_found_out_and_believed_again() -> None:
    draws = np.random.default_rng(0)
    curve = Calibration()
    for truth in (0.3, 0.9):
        for _ in range(2000):
            curve.observe(0.9, bool(draws.random() < truth))
        assert curve([0.9])[0] == pytest.approx(truth, abs=0.12)
    assert curve([0.1])[0] < 0.2  # nothing was said of that


def test_only_what_was_tested_teaches() -> None:
    """The second node of a chain whose first was rejected was never looked at."""
    known, rates = Knowledge(), Rates()
    tree = DraftTree((1, 2), (-1, 0), confidence=(0.5, 0.9))
    for _ in range(100):
        known.learn(rates, tree, Verdict((), (7,), tested=1))
    low, high = known.curve([0.5, 0.9])
    assert low < 0.1 and high > 0.8
    assert known.expected(rates, tree)[0] < 0.1


def stats(plan: SpeculationPlan, alpha: float, batch: int = 12) -> tuple[SpeculationStats, int]:
    clock = SimClock()
    drafter = OracleDrafter(LANGUAGE, clock, constant(alpha), 0.0002, seed=1, spread=0.6)
    options = EngineOptions(max_batch=batch, token_budget=128, oracle=True)
    engine = Engine(
        SimDevice(LANGUAGE, clock, STEEP, 1024, 4),
        Letters(),
        (),
        {"sim": drafter},
        options,
        clock,
        profile=STEEP,
    )
    driver = Driver(engine)
    sampling = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    plain = Driver(Engine(SimDevice(LANGUAGE, SimClock(), STEEP, 1024, 4), Letters(), (), {}, options))
    for asked, of in ((driver, plan), (plain, PLAIN)):
        asked.submit(
            GenerateRequest(str(rid), tuple(range(rid, rid + 5)), sampling, of) for rid in range(batch)
        )
        asked.finish()
    assert plan.shadow or {k: o.ids for k, o in driver.outcomes.items()} == {
        k: o.ids for k, o in plain.outcomes.items()
    }
    total = sum((c.stats for report in driver.reports for c in report.counts), SpeculationStats())
    return total, sum(report.trimmed_nodes for report in driver.reports)


def test_alpha_is_that_of_whole_drafts_and_trimming_does_not_raise_it() -> None:
    found, cut = stats(SpeculationPlan("sim", 4, adaptive=True), 0.6)
    assert cut > 0.2 * found.drafted and found.drafted - found.verified == cut
    assert found.tested > 100 and found.tested < sum(found.tries) / 4
    assert found.alpha == pytest.approx(0.6, abs=0.09)
    assert found.acceptance is not None and found.acceptance > 0.63  # what was tested was the likelier part


@pytest.mark.parametrize("changes", [{"adaptive": False}, {"state": "probe"}])
def test_what_must_be_measured_or_was_asked_for_is_not_trimmed(changes: dict[str, object]) -> None:
    plan = replace(SpeculationPlan("sim", 4, adaptive=True), **changes)  # type: ignore[arg-type]
    found, cut = stats(plan, 0.6, batch=4)
    assert cut == 0 and found.verified == found.drafted and found.tested == sum(found.tries)


def test_a_shadow_is_trimmed_as_the_others_are() -> None:
    found, cut = stats(SpeculationPlan("sim", 4, adaptive=True, shadow=True), 0.6)
    assert cut > 0.2 * found.drafted
