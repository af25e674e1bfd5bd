"""The weekly comparison of acceptance, and the quality gate."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import numpy as np
import pytest
from support.finished import finished

from gammaray.routing.health import SIZE, WEEK_S, HealthJob, Reservoir, compare
from gammaray.routing.histogram import quantiles
from gammaray.routing.quality import correlation, mean_kl, perplexity
from gammaray.types import WARMUP_CLASS, Finished, Quality, SpeculationStats

KEY = ("chat", "default", "lookup")


def week(chance: float, n: int = 400, tested: int = 100, request_class: str = "default") -> list[Finished]:
    rng = np.random.default_rng(int(1000 * chance))
    accepted = rng.binomial(tested, chance, n)
    stats = [SpeculationStats(tries=(tested,), first_hits=int(one)) for one in accepted]
    return [finished(stats=one, request_class=request_class) for one in stats]


def after_two_weeks(first: list[Finished], second: list[Finished]) -> dict[tuple[str, str, str | None], str]:
    job = HealthJob(now=0.0)
    job.add(first)
    assert job.run(WEEK_S) == {}
    job.add(second)
    return job.run(2 * WEEK_S)


def test_a_fall_of_more_than_15_percent_alarms() -> None:
    alarm = after_two_weeks(week(0.65), week(0.5))[KEY]
    assert alarm.startswith("acceptance is down on last week: P50 fell from 0.65 to 0.50, P95 fell")
    assert after_two_weeks(week(0.65), week(0.6)) == {}
    assert after_two_weeks(week(0.5), week(0.65)) == {}


@pytest.mark.parametrize("name", ["p50", "p95", "p99"])
def test_each_watched_quantile_alarms_alone(name: str) -> None:
    before: dict[str, float | None] = {"p5": 0.2, "p50": 0.4, "p95": 0.6, "p99": 0.8}
    was = before[name]
    assert was is not None
    assert compare(before, before | {name: 0.86 * was, "p5": 0.01}) is None
    found = compare(before, before | {name: 0.84 * was})
    assert found is not None and found.count("fell") == 1 and name.upper() in found


def test_a_week_must_be_over_and_have_enough_requests() -> None:
    job = HealthJob(now=0.0)
    job.add(week(0.65))
    job.run(WEEK_S)
    job.add(week(0.3, n=150))
    assert job.run(2 * WEEK_S - 1) == {}
    assert job.run(2 * WEEK_S) == {}  # too few: they wait for the next week's
    job.add(week(0.31, n=100))
    assert KEY in job.run(3 * WEEK_S)


def test_synthetic_and_hardly_tested_requests_do_not_count() -> None:
    def ignored(chance: float) -> list[Finished]:
        return week(chance, request_class=WARMUP_CLASS) + week(chance, tested=31)

    assert after_two_weeks(week(0.65) + ignored(0.65), week(0.65) + ignored(0.1)) == {}


def test_the_state_survives_json_at_any_moment() -> None:
    def with_restarts(restart: Callable[[HealthJob], HealthJob]) -> dict[tuple[str, str, str | None], str]:
        job = restart(HealthJob(now=0.0))
        for number, chance in enumerate((0.65, 0.5), start=1):
            job.add(week(chance)[:200])
            job = restart(job)
            job.add(week(chance)[200:])
            alarms = restart(job).run(number * WEEK_S)
            job.run(number * WEEK_S)
        return alarms

    stored = with_restarts(lambda job: HealthJob(now=1e9, state=json.loads(json.dumps(job.state()))))
    assert stored == with_restarts(lambda job: job) == after_two_weeks(week(0.65), week(0.5))


def test_the_reservoir_is_a_uniform_sample_of_1000() -> None:
    reservoir, rng = Reservoir(), random.Random(1)
    for value in range(20_000):
        reservoir.add(value / 20_000, rng)
    assert len(reservoir.alphas) == SIZE and reservoir.seen == 20_000
    found = quantiles(np.array(reservoir.alphas))
    assert found["p50"] == pytest.approx(0.5, abs=0.06) and found["p95"] == pytest.approx(0.95, abs=0.03)


def test_kl_is_weighted_with_tokens_and_the_gate_waits_for_200() -> None:
    good, bad = Quality(tokens=150, kl=0.01, perplexity=4.0), Quality(tokens=50, kl=0.4, perplexity=16.0)
    assert mean_kl([good, bad]) == pytest.approx(0.1075)
    assert perplexity([good, bad]) == pytest.approx(2 ** (0.75 * 2 + 0.25 * 4))
    assert mean_kl([]) is None and perplexity([]) is None


def test_alpha_and_kl_that_move_together_correlate() -> None:
    alphas = np.linspace(0.1, 0.9, 9)
    assert correlation(alphas, 0.1 - 0.1 * alphas) == pytest.approx(-1)
    assert correlation(alphas, np.zeros(9)) is None
