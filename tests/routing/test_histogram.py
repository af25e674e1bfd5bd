"""The spread of acceptance: the dip test against its definition, and two peaks that are seen as two."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from support.finished import finished

from gammaray.routing.dip import Values, dip, dip_statistic, uniform_dips
from gammaray.routing.histogram import bimodal, histogram, peaks, quantiles
from gammaray.types import SpeculationStats


def alphas_of(rng: np.random.Generator, chances: Values, tested: int = 150) -> Values:
    return rng.binomial(tested, chances) / tested


def two_peaks(n: int, seed: int = 0) -> Values:
    """Half of the requests at 8-15 %, half at 55-70 %, and one in ten between."""
    rng = np.random.default_rng(seed)
    parts = rng.uniform(0.08, 0.15, n * 9 // 20), rng.uniform(0.55, 0.70, n * 9 // 20)
    return alphas_of(rng, np.concatenate([*parts, rng.uniform(0.15, 0.55, n // 10)]))


def least_distance(values: Values) -> float:
    """The dip by its definition: linear programmes, one for each point that may be the mode.

    G is convex up to the mode, where it may jump, and concave from there, linear between the points. At each
    point it is within the distance of F on both sides of F's own jump.
    """
    x, times = np.unique(values, return_counts=True)
    after = np.cumsum(times) / len(values)
    return min(_distance_with_mode(x, after - times / len(values), after, mode) for mode in range(len(x)))


def _distance_with_mode(x: Values, before: Values, after: Values, mode: int) -> float:
    size = len(x) + 2  # heights up to the mode, from the mode on, and the distance
    rows: list[Values] = []
    limits: list[float] = []

    def at_most(limit: float, terms: dict[int, float]) -> None:
        row = np.zeros(size)
        row[list(terms)] = list(terms.values())
        rows.append(row)
        limits.append(limit)

    def near(height: int, lowest: float, highest: float) -> None:
        at_most(highest, {height: 1, size - 1: -1})
        at_most(-lowest, {height: -1, size - 1: -1})

    def bends(heights: tuple[int, int, int], at: int, sign: float) -> None:
        left, right = 1 / (x[at] - x[at - 1]), 1 / (x[at + 1] - x[at])
        at_most(0, dict(zip(heights, (-sign * left, sign * (left + right), -sign * right), strict=True)))

    for i in range(len(x)):
        if i < mode:
            near(i, after[i], before[i])
        elif i > mode:
            near(i + 1, after[i], before[i])
    near(mode, before[mode], before[mode])
    near(mode + 1, after[mode], after[mode])
    for i in range(len(x)):
        at_most(0, {i: 1, i + 1: -1})
    for i in range(1, mode):
        bends((i - 1, i, i + 1), i, 1)
    for i in range(mode + 1, len(x) - 1):
        bends((i, i + 1, i + 2), i, -1)
    found = linprog(np.eye(size)[-1], A_ub=np.array(rows), b_ub=limits, bounds=(0, 1), method="highs")
    return float(found.fun)


@given(
    st.lists(
        st.one_of(st.integers(0, 9), st.floats(0, 9).map(lambda x: round(x, 3))), min_size=1, max_size=14
    )
)
def test_the_dip_is_the_least_distance_to_a_unimodal_distribution(values: list[float]) -> None:
    sample = np.array(values, float)
    assert dip_statistic(sample) == pytest.approx(least_distance(sample), abs=1e-7)


def test_dips_with_a_closed_form() -> None:
    assert dip_statistic(np.arange(50.0)) == pytest.approx(1 / 100)  # evenly spread: half a jump
    assert dip_statistic(np.array([0.0, 0.0, 1.0, 1.0])) == pytest.approx(0.25)  # the largest that there is
    assert dip_statistic(np.full(9, 0.3)) == 0.0
    assert dip(np.array([0.5])) == (0.0, 1.0)


def test_the_dip_does_not_depend_on_order_scale_or_direction() -> None:
    values = np.random.default_rng(1).normal(size=300)
    assert dip_statistic(-7 * values[::-1] + 3) == pytest.approx(dip_statistic(values))


def test_p_of_uniform_samples_is_uniform() -> None:
    rng = np.random.default_rng(7)
    chances = np.array([dip(rng.random(256))[1] for _ in range(200)])
    assert 0.02 <= (chances < 0.1).mean() <= 0.18
    assert 0.4 <= np.median(chances) <= 0.6


def test_the_null_distribution_hardly_depends_on_the_size() -> None:
    """So one table per power of 2 does."""
    medians = [np.median(uniform_dips(size)) for size in (128, 256, 512)]
    assert max(medians) < 1.05 * min(medians)


def test_two_peaks_are_significant_and_one_is_not() -> None:
    assert dip(two_peaks(1000))[1] < 0.01
    assert dip(np.random.default_rng(2).normal(0.5, 0.1, 1000))[1] > 0.2


def test_the_histogram_shows_both_peaks() -> None:
    alphas = two_peaks(1000)
    counts = histogram(alphas)
    assert counts.shape == (25,) and counts.sum() == 1000
    low, high = peaks(alphas)
    assert 0.08 <= low <= 0.15 and 0.55 <= high <= 0.70
    assert bimodal(alphas)


def test_every_alpha_falls_into_its_bin() -> None:
    edges = np.array([k / 25 for k in range(26)])
    assert histogram(edges).tolist() == [1] * 24 + [2]
    assert histogram(np.array([0.0399, 0.04, 0.999])).nonzero()[0].tolist() == [0, 1, 24]


def test_few_requests_are_not_called_bimodal() -> None:
    alphas = two_peaks(400)
    assert bimodal(alphas)
    assert not bimodal(np.random.default_rng(0).permutation(alphas)[:199])


def test_a_shallow_valley_makes_no_second_peak() -> None:
    rng = np.random.default_rng(3)
    alphas = alphas_of(rng, np.concatenate((rng.uniform(0.1, 0.4, 1500), rng.uniform(0.3, 0.6, 1500))))
    assert len(peaks(alphas)) == 1
    assert not bimodal(alphas)


def test_a_few_strays_are_no_peak() -> None:
    alphas = np.concatenate((np.random.default_rng(4).normal(0.6, 0.03, 1000), np.full(8, 0.1)))
    assert peaks(alphas) == pytest.approx([0.6], abs=0.03)


@pytest.mark.parametrize("chance", [0.02, 0.5, 0.98])
def test_the_grid_of_few_tested_tokens_is_not_bimodal(chance: float) -> None:
    alphas = alphas_of(np.random.default_rng(5), np.full(1000, chance), tested=32)
    assert len(peaks(alphas)) == 1
    assert not bimodal(alphas)


def test_chance_makes_peaks_but_not_bimodal_ones() -> None:
    """Evenly spread requests of few tokens: grid and noise together part the histogram now and then."""
    rng = np.random.default_rng(8)
    samples = [alphas_of(rng, rng.random(200), tested=32) for _ in range(100)]
    assert sum(len(peaks(alphas)) > 1 for alphas in samples) > 10
    assert sum(map(bimodal, samples)) <= 2


def test_nothing_has_no_peak_and_no_quantile() -> None:
    assert peaks(np.array([])) == []
    assert quantiles(np.array([])) == {"p5": None, "p50": None, "p95": None, "p99": None}
    assert quantiles(np.arange(101.0)) == {"p5": 5.0, "p50": 50.0, "p95": 95.0, "p99": 99.0}


def test_only_requests_with_enough_tested_tokens_count_and_those_that_broke_before() -> None:
    """Without the latter the lower peak would be missing: a breaker opens after 16 rounds, that is about 18
    tested tokens at an acceptance of 0.12."""
    stats = [SpeculationStats(tries=(tested,), first_hits=tested // 2) for tested in (31, 32, 64, 0)]
    assert [finished(stats=one).alpha for one in stats] == [None, 0.5, 0.5, None]
    broke = finished(fallback="low_acceptance", stats=SpeculationStats(tries=(18,), first_hits=2))
    assert broke.alpha == pytest.approx(2 / 18)
    assert finished(fallback="kv", stats=SpeculationStats(tries=(18,), first_hits=2)).alpha is None
