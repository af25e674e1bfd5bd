"""Speculative = plain, whatever the controller does meanwhile: shadows, breakers, policies, audits, aborts.

And what the steps tell of it adds up. As test_lossless.py, with the state oracle on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decoding import Driver, Outcome, run
from support.lossless import VOCAB, engine, plainly, requests, same
from support.tape import Pieces

from gammaray.engine import breaker
from gammaray.engine.profile import StepProfile
from gammaray.types import (
    NO_STATS,
    Finished,
    GenerateRequest,
    Grammar,
    KeyCounts,
    KeyPolicy,
    PolicySnapshot,
    SamplingParams,
    SpeculationPlan,
    SpeculationStats,
    State,
    StepReport,
)

PROFILE = StepProfile(((1, 0.010), (64, 0.050)))  # drafts cost something, so that breakers open
DRAFTERS = (None, "ngram", "good", "poor", "sampled", "short", "ahead", "ahead-sampled")
STATES: tuple[State, ...] = ("on", "contract", "probe", "shadow", "emergency", "off", "pinned_off")

plans = st.builds(
    SpeculationPlan,
    drafter=st.sampled_from(DRAFTERS),
    gamma=st.integers(0, 6),
    width=st.integers(1, 4),
    adaptive=st.booleans(),
    epoch=st.integers(0, 2),
    shadow=st.booleans(),
)
sizes = st.fixed_dictionaries(  # 11 blocks hold the longest text
    {
        "blocks": st.sampled_from([11, 14, 18, 40]),
        "max_batch": st.sampled_from([2, 8]),
        "budget": st.sampled_from([8, 24, 64]),
        "prefix_cache": st.booleans(),
    }
)
keys = st.tuples(st.sampled_from(["a", "b"]), st.just("default"), st.sampled_from(DRAFTERS))
policies = st.builds(
    PolicySnapshot,
    version=st.integers(0, 9),
    speculation=st.sampled_from([True, True, True, False]),
    keys=st.dictionaries(
        keys,
        st.builds(
            KeyPolicy,
            state=st.sampled_from(STATES),
            gamma=st.integers(0, 6),
            width=st.integers(1, 4),
            epoch=st.integers(0, 2),
        ),
        max_size=6,
    ),
    weights=st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from([0.01, 0.5, 3.0])),
    kv_shares=st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from([0.1, 0.5])),
    audit=st.frozensets(keys),
)


@st.composite
def batches(draw: st.DrawFn) -> list[GenerateRequest]:
    """Most go on for long, so that there are breakers and preemptions.

    A shadow may ask for rejection, which is for what a request emits; a shadow emits none of its draft.
    """
    batch = []
    for request in draw(requests):
        plan, sampling = draw(plans), request.sampling
        if plan.shadow:
            plan = replace(plan, verification=draw(st.sampled_from(["coupled", "rejection"])))
        if draw(st.sampled_from([True, True, False])):
            sampling = replace(sampling, max_tokens=24, stop=(), ignore_eos=sampling.grammar is None)
        batch.append(replace(request, plan=plan, sampling=sampling))
    return batch


@dataclass(frozen=True)
class Course:
    """What happens while a batch runs."""

    policies: Sequence[PolicySnapshot]  # in turn, one every `every` steps
    every: int
    gap: int  # steps between two submissions
    aborted: frozenset[int]
    at: int  # ... in this step


courses = st.builds(
    Course,
    st.lists(policies, min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(0, 3),
    st.frozensets(st.integers(0, 4), max_size=2),
    st.integers(0, 20),
)


def serve(driver: Driver, batch: Sequence[GenerateRequest], course: Course) -> None:
    for step in range(400):
        driver.submit(r for i, r in enumerate(batch) if i * course.gap == step)
        if step % course.every == 0:
            driver.engine.apply(course.policies[step // course.every % len(course.policies)])
        if step == course.at:
            for request in course.aborted:
                driver.engine.abort(str(request))
        if step > 4 * course.gap and step > course.at and all(o.finish for o in driver.outcomes.values()):
            break
        driver.step()
    driver.finish()


@pytest.fixture(scope="module", autouse=True)
def early_breakers() -> Iterator[None]:
    """These texts are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(breaker, "ROUNDS", 3)
        yield


@settings(max_examples=150)
@given(batch=batches(), size=sizes, course=courses)
def test_no_control_changes_a_text_and_the_reports_add_up(
    batch: list[GenerateRequest], size: dict[str, int], course: Course
) -> None:
    driver = Driver(engine(**size, profile=PROFILE))
    serve(driver, batch, course)
    for request in batch:
        for key, expected in plainly(request).items():
            found = driver.outcomes[key]
            if found.finish == "abort":
                assert int(request.request_id) in course.aborted
                assert expected.ids[: len(found.ids)] == found.ids
            else:
                assert same(found, expected), (request, found, expected)
    assert driver.engine.cache.pool.used == 0
    check_reports(driver, batch)


def check_reports(driver: Driver, batch: Sequence[GenerateRequest]) -> None:
    reports = driver.reports
    ended = {(one.request_id, one.index): one for report in reports for one in report.finished}
    assert sum(len(report.finished) for report in reports) == len(ended)  # each once
    assert ended.keys() == driver.outcomes.keys() == {(r.request_id, i) for r in batch for i in range(r.n)}
    for key, outcome in driver.outcomes.items():
        check_ended(ended[key], outcome)
    told = [part for report in reports for part in report.counts]
    for stats in chain((part.stats for part in told), (one.stats for one in ended.values())):
        check_stats(stats)
    for report in reports:
        check_step(report)
    check_sums(told, ended, driver.outcomes)


def check_ended(ended: Finished, outcome: Outcome) -> None:
    assert ended.reason == outcome.finish
    assert ended.output_tokens == len(outcome.ids)
    if not ended.shadow:
        assert ended.stats == outcome.stats
    assert ended.fallback is None or not ended.shadow
    assert 0 <= ended.queued_s <= ended.total_s and 0 <= ended.first_s <= ended.total_s
    if ended.quality is not None:
        assert ended.quality.kl < 1e-9  # a model of exact logits
        assert ended.quality.tokens >= ended.output_tokens  # what a stop string cuts was verified too


def check_stats(stats: SpeculationStats) -> None:
    assert sum(stats.lengths) == stats.rounds
    assert sum(k * rounds for k, rounds in enumerate(stats.lengths)) == stats.emitted
    assert sum(stats.level_tested) == stats.tested
    assert sum(stats.level_first) == stats.first_accepted <= stats.tested
    assert sum(stats.ranks) == sum(stats.level_accepted) <= sum(stats.hits)
    assert stats.first_hits <= sum(stats.hits) and stats.accepted <= sum(stats.hits) <= sum(stats.tries)
    assert stats.accepted <= stats.verified <= stats.drafted
    assert stats.levels <= stats.verified


def check_step(report: StepReport) -> None:
    assert len({part.key for part in report.counts}) == len(report.counts)
    assert report.target_reuse.reused <= report.target_reuse.seen
    assert report.draft_reuse.reused <= report.draft_reuse.seen
    for part in report.counts:
        assert part.running <= report.running
        assert (part.base_s > 0) == (part.drafter is not None)
        assert part.extra_s >= 0.0
        assert part.drafter is not None or part.stats.drafted == 0


def check_sums(
    told: Sequence[KeyCounts],
    ended: dict[tuple[str, int], Finished],
    outcomes: dict[tuple[str, int], Outcome],
) -> None:
    """A round counts once, for its sequence and for a key. Of a shadow, for what would have been."""

    def whole(parts: Iterator[SpeculationStats | None]) -> SpeculationStats:
        return sum((stats for stats in parts if stats is not None), NO_STATS)

    assert whole(part.stats for part in told).rounds == whole(o.stats for o in outcomes.values()).rounds
    drafted = whole(part.stats for part in told if part.drafter is not None)
    by_sequence = whole(one.stats for one in ended.values())
    for name in ("drafted", "verified", "accepted", "tested", "first_accepted", "levels"):
        assert getattr(drafted, name) == getattr(by_sequence, name)
    if not any(one.shadow for one in ended.values()):
        assert whole(part.stats for part in told) == by_sequence


# One by one -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("breaks", "fallback"), [(True, "low_acceptance"), (False, None)])
def test_breakers_open_in_these_batches(breaks: bool, fallback: str | None) -> None:
    """Equality alone would also hold if none ever did. Where a drafter is measured none may: what is accepted
    once it has ended is not counted, so that a poor one would look better."""
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    plan = SpeculationPlan("ngram", 4, adaptive=True, breaks=breaks)
    driver = Driver(engine(profile=PROFILE))
    driver.submit([GenerateRequest("r", (1, 2, 3), sampling, plan)])
    driver.finish()
    (ended,) = driver.reports[-1].finished
    assert ended.fallback == fallback


@pytest.mark.parametrize("shadow", [False, True])
def test_a_dead_end_comes_where_plain_decoding_meets_it(shadow: bool) -> None:
    """The grammar wants 3 after 2, and nothing may: a draft of 1, 2 runs into it two tokens ahead."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=20, grammar=Grammar("regex", "0123"), bad_words=((3,),)
    )
    request = GenerateRequest(
        "r", (0, 1, 2, 3, 0, 1, 2, 3), sampling, SpeculationPlan("ngram", 4, shadow=shadow)
    )
    found, expected = run(engine(), [request])["r", 0], plainly(request)["r", 0]
    assert same(found, expected)
    assert (found.ids, found.finish) == ([0, 1, 2], "error")


def test_a_stop_string_that_shows_as_the_text_ends_is_reported_as_one() -> None:
    """Each token ends within a character, so that none of its text counts before the end."""
    pieces = Pieces(*[b"ab\xe6"] * VOCAB)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, stop=("b",), ignore_eos=True)
    driver = Driver(engine(decoder=pieces))
    driver.submit([GenerateRequest("r", (1, 2), sampling)])
    driver.finish()
    assert driver.outcomes["r", 0].finish == "stop"
    check_ended(driver.reports[-1].finished[0], driver.outcomes["r", 0])


def test_what_a_grammar_cuts_was_drafted_but_not_verified() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=12, grammar=Grammar("regex", "012"))
    request = GenerateRequest("r", (0, 1, 2, 3, 0, 1, 2, 3), sampling, SpeculationPlan("ngram", 4))
    driver = Driver(engine(profile=PROFILE))
    driver.submit([request])
    driver.finish()
    check_reports(driver, [request])
    stats = driver.reports[-1].finished[0].stats
    assert stats.drafted > stats.verified > 0
