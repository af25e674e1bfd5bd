"""A predictor is let out when it is better than what there is, and taken back when it no longer is."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from math import nan
from subprocess import run

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bimodal import MODES, finished, traffic

from gammaray.routing.calibration import beats, brier, platt
from gammaray.routing.features import PRIOR, features
from gammaray.routing.learning import (
    APART_S,
    BAND,
    EVERY,
    LEAST,
    MOST,
    TESTED,
    Learner,
    Priors,
    Reservoir,
    Samples,
    decide,
    train,
)
from gammaray.routing.predictor import Floats, Predictor, logistic
from gammaray.types import WARMUP_CLASS, Finished, Forecast, SpeculationStats

KEY = ("tenant-0", "default", "lookup")


def learnt(requests: Iterable[Finished], learner: Learner | None = None) -> Learner:
    """A learner after requests that come ten a second."""
    learner = learner or Learner()
    for i, one in enumerate(requests):
        learner.add(one)
        learner.maybe_train(i / 10)
    return learner


def samples(requests: Iterable[Finished]) -> Samples:
    kept = Reservoir(20_000)
    for one in requests:
        kept.add(one)
    return kept.samples()


def one(alpha: float = 0.5, tested: int = 100, **changes: object) -> Finished:
    """A request of tenant-0."""
    given = finished(np.random.default_rng(0), 1, tenant="tenant-0", repeats=True, prior=None)
    stats = SpeculationStats(tries=(tested,), first_hits=round(alpha * tested))
    return replace(given, stats=stats, **changes)  # type: ignore[arg-type]


# What is learnt --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bimodal() -> tuple[Predictor, Samples]:
    """Learnt from 2,000 requests, and 1,000 later ones."""
    requests = list(traffic(3000))
    predictor = learnt(requests[:2000]).predictor
    assert predictor is not None
    return predictor, samples(requests[2000:])


def test_two_modes_are_told_apart(bimodal: tuple[Predictor, Samples]) -> None:
    predictor, later = bimodal
    low, high = (predictor.many(later.rows[mask]) for mask in (later.rates < 0.3, later.rates > 0.45))
    assert low.mean() == pytest.approx(MODES[0], abs=0.03)
    assert high.mean() == pytest.approx(MODES[1], abs=0.03)
    assert np.quantile(low, 0.95) < np.quantile(high, 0.05)


def test_predictions_beat_the_prior_by_far(bimodal: tuple[Predictor, Samples]) -> None:
    predictor, later = bimodal
    scores = {
        name: np.average(brier(alphas, later.rates), weights=later.weights)
        for name, alphas in {
            "ours": predictor.many(later.rows),
            "prior": later.rows[:, PRIOR],
            "truth": later.rates,  # what no prediction can go below
        }.items()
    }
    assert scores["ours"] - scores["truth"] < 0.2 * (scores["prior"] - scores["truth"])


def test_predictions_are_calibrated(bimodal: tuple[Predictor, Samples]) -> None:
    predictor, later = bimodal
    alphas = predictor.many(later.rows)
    for low, high in ((0.0, 0.3), (0.3, 1.0)):
        mask = (alphas >= low) & (alphas < high)
        assert alphas[mask].mean() == pytest.approx(later.rates[mask].mean(), abs=0.02)


def test_a_tenant_without_a_prior_and_an_empty_prompt_are_predicted_too(
    bimodal: tuple[Predictor, Samples],
) -> None:
    for prompt in ([], [4], [1, 2, 3] * 50):
        alpha = bimodal[0].predict(features(prompt, 2.0, "new", "new", "new", None))
        assert alpha is not None and 0 < alpha < 1


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_never_let_out(seed: int) -> None:
    assert learnt(traffic(3000, told_apart=False, seed=seed)).predictor is None


# When it is let out ----------------------------------------------------------------------------------


def test_a_predictor_needs_samples_and_time() -> None:
    requests, learner = list(traffic(2 * EVERY)), Learner(version=41)
    for request in requests[: EVERY - 1]:
        learner.add(request)
    assert learner.maybe_train(1000.0) is None
    learner.add(requests[EVERY - 1])
    first = learner.maybe_train(1000.0)
    assert first is not None and first.version == 42
    for request in map(changed, requests[EVERY:]):
        learner.add(request)
    assert learner.maybe_train(1000.0 + APART_S - 1) is None
    second = learner.maybe_train(1000.0 + APART_S)  # new or withdrawn: the first is good for nothing now
    assert second is not None and second.version == 43 and learner.predictor is second


def changed(request: Finished) -> Finished:
    """Of a world where what was accepted is not any more, and the other way round."""
    stats = request.stats
    return replace(request, stats=replace(stats, first_hits=sum(stats.tries) - stats.first_hits))


def test_no_new_version_without_a_better_one() -> None:
    learner = learnt(traffic(4000))
    assert learner.predictor is not None and learner.predictor.version == 1


def test_what_has_become_worse_than_the_prior_is_withdrawn() -> None:
    told = samples(traffic(1000))
    predictor = decide(told, None, 1)
    assert predictor is not None and predictor.trees is not None
    noise = samples(traffic(2000, told_apart=False, seed=5))
    withdrawn = decide(noise, predictor, 2)
    assert withdrawn is not None and (withdrawn.version, withdrawn.trees) == (2, None)
    assert decide(noise, withdrawn, 3) is None
    again = decide(told, withdrawn, 3)
    assert again is not None and again.trees is not None


def test_a_predictor_of_another_release_is_no_rival() -> None:
    told = samples(traffic(1000))
    old = Predictor(6, told.rows.shape[1] - 1, train(*told.split()[:2], 6).trees)
    decided = decide(told, old, 7)
    assert decided is not None and decided.version == 7 and decided.trees is not None


def test_a_constant_is_no_predictor() -> None:
    """Priors stay within their band: where all is below it, a mean would beat them, and tell nothing."""
    noise = samples(traffic(2000, told_apart=False))
    low = Samples(noise.rows, 0.3 * noise.rates, noise.weights)
    assert decide(low, None, 1) is None


def test_training_twice_gives_the_same() -> None:
    told = samples(traffic(1000))
    first, second = (train(*told.split()[:2], 1) for _ in range(2))
    assert np.array_equal(first.many(told.rows), second.many(told.rows))


def test_samples_are_split_in_the_order_of_time() -> None:
    rates = np.arange(100) / 100
    parts = Samples(np.zeros((100, 2)), rates, np.ones(100)).split()
    assert [[*part.rates] for part in parts] == [[*rates[:80]], [*rates[80:90]], [*rates[90:]]]


@pytest.mark.parametrize(
    "nothing",
    [
        one(tested=TESTED - 1),
        one(request_class=WARMUP_CLASS),
        one(forecast=Forecast()),
        one(forecast=Forecast((0.5,) * 3)),  # of another release
    ],
)
def test_what_tells_nothing_is_not_counted(nothing: Finished) -> None:
    learner = Learner()
    for request in [*list(traffic(EVERY - 1)), nothing]:
        learner.add(request)
    assert learner.maybe_train(0.0) is None
    learner.add(one(tested=32))
    assert learner.maybe_train(0.0) is not None


def test_routers_never_load_lightgbm() -> None:
    code = "import sys, gammaray.routing.learning; sys.exit('lightgbm' in sys.modules)"
    assert run([sys.executable, "-c", code]).returncode == 0


# The reservoir ---------------------------------------------------------------------------------------


def test_a_noisy_tenant_displaces_only_itself() -> None:
    kept = Reservoir(1000)
    for request in [one(tenant="quiet")] * 200 + [one(tenant="noisy")] * 20_000:
        kept.add(request)
    assert kept.counts() == {"quiet": 200, "noisy": 800}


def test_a_newcomer_finds_room() -> None:
    kept = Reservoir(1000)
    for request in [one(tenant="a")] * 5000 + [one(tenant="b")] * 5000:
        kept.add(request)
    counts = kept.counts()
    assert sum(counts.values()) == 1000 and abs(counts["a"] - counts["b"]) < 50


def test_samples_come_oldest_first_and_the_old_fade() -> None:
    kept = Reservoir(500)
    for i in range(5000):
        kept.add(one(alpha=i / 5000, tested=5000))
    rates = kept.samples().rates
    assert len(rates) == 500 and (np.diff(rates) > 0).all()
    assert np.median(rates) > 0.75 > rates.min()
    assert set(kept.samples().weights) == {256.0}


# Priors ----------------------------------------------------------------------------------------------


def test_a_prior_comes_with_requests_enough() -> None:
    priors = Priors()
    for _ in range(LEAST - 1):
        priors.add(one(0.6))
    priors.add(one(0.9, tested=TESTED - 1))
    assert priors.of(KEY) is None and priors.snapshot() == {}
    priors.add(one(0.6))
    assert priors.of(KEY) == pytest.approx(0.6)
    assert priors.snapshot() == {KEY: priors.of(KEY)} and priors.of(("other", "default", None)) is None


@given(st.lists(st.floats(0, 1), min_size=LEAST, max_size=100))
def test_a_prior_stays_in_its_band(alphas: list[float]) -> None:
    priors = Priors()
    for alpha in alphas:
        priors.add(one(alpha))
    prior = priors.of(KEY)
    assert prior is not None and BAND[0] <= prior <= BAND[1]
    assert prior == pytest.approx(np.clip(np.mean([round(a * 100) / 100 for a in alphas]), *BAND))


def test_a_prior_follows_its_last_requests() -> None:
    priors = Priors()
    for request in [one(0.8)] * 5000 + [one(0.5)] * MOST:
        priors.add(request)
    assert priors.of(KEY) == pytest.approx(0.5 + 0.3 * (1 - 1 / MOST) ** MOST)


# Calibration -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slope", "offset"), [(1.0, 0.0), (0.5, 0.4), (1.6, -0.5)])
def test_platt_finds_the_line(slope: float, offset: float) -> None:
    scores = np.random.default_rng(0).normal(0, 2, 5000)
    found = platt(scores, logistic(slope * scores + offset), np.ones(5000))
    assert found == pytest.approx((slope, offset), abs=0.01)


@given(
    st.lists(st.tuples(st.floats(-40, 40), st.floats(0, 1), st.integers(32, 256)), min_size=1, max_size=30)
)
def test_platt_never_turns_the_order_round(given: list[tuple[float, float, int]]) -> None:
    scores, rates, weights = np.array(given, np.float64).T
    slope, offset = platt(scores, rates, weights)
    assert slope >= 0 and np.isfinite([slope, offset]).all()


def test_few_requests_hardly_bend_the_line() -> None:
    assert platt(np.array([1.0]), np.array([0.0]), np.array([256.0])) == pytest.approx((1, 0), abs=0.5)


def test_brier_is_the_mean_over_tested_tokens() -> None:
    tokens = np.array([1.0] * 30 + [0.0] * 70)
    assert brier(np.array([0.4]), np.array([0.3])) == pytest.approx(np.mean((tokens - 0.4) ** 2))


def test_better_by_chance_does_not_count() -> None:
    rng = np.random.default_rng(0)
    rates: Floats = rng.uniform(0, 1, 400)
    near, far = np.clip(rates + rng.normal(0, 0.1, (2, 400)), 0, 1)
    ones = np.ones(400)
    assert not beats(near, far, rates, ones) and not beats(far, near, rates, ones)
    assert beats(rates, near, rates, ones) and not beats(near, rates, rates, ones)
    assert not beats(near, near, rates, ones)


def test_a_missing_prior_counts_as_the_mean() -> None:
    told = samples(traffic(1000))
    told.rows[:, PRIOR] = nan
    assert decide(told, None, 1) is not None


def test_a_tenant_that_went_leaves_no_prior() -> None:
    priors = Priors()
    for _ in range(LEAST):
        priors.add(one(0.6))
    priors.forget({"other"})
    assert priors.of(KEY) is not None
    priors.forget({KEY[0]})
    assert priors.of(KEY) is None
