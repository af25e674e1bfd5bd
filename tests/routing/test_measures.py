"""Measures over rows: closed forms where drafts are accepted independently, and simulated rounds."""

from __future__ import annotations

import numpy as np
import pytest

from gammaray.routing import depth, measures
from gammaray.routing.window import COLUMN, LEVELS, TPOT_EDGES, VECTOR, WIDTH, Counts, Phases, add_stats
from gammaray.types import SpeculationStats

ROUNDS = 100_000
STEP_S = 0.02


def expected_tau(alpha: float, gamma: int) -> float:
    return float((1 - alpha ** (gamma + 1)) / (1 - alpha))


def ideal(alpha: float, gamma: int = LEVELS, c: float = 0.05, width: int = 1, rounds: int = ROUNDS) -> Counts:
    """[1, WIDTH] of `rounds` rounds, each level accepted with `alpha` by its first child, in expectation."""
    reached = rounds * alpha ** np.arange(gamma + 1)
    row = np.zeros(WIDTH)
    row[VECTOR["level_tested"]][:gamma] = reached[:-1]
    for name in ("level_first", "level_accepted"):
        row[VECTOR[name]][:gamma] = reached[1:]
    row[VECTOR["ranks"].start] = reached[1:].sum()
    nodes = rounds * gamma * width
    scalars = {"rounds": rounds, "drafted": nodes, "verified": nodes, "accepted": reached[1:].sum()}
    scalars |= {"emitted": reached.sum(), "tested": reached[:-1].sum(), "first_accepted": reached[1:].sum()}
    scalars |= {"levels": rounds * gamma}
    scalars |= {"base_s": rounds * STEP_S, "extra_s": rounds * gamma * c * STEP_S}
    for name, value in scalars.items():
        row[COLUMN[name]] = value
    return row[None]


def simulated(seed: int, chances: list[float], gamma: int, rounds: int, trim: int = 0) -> Counts:
    """[1, WIDTH] of trees `gamma` deep; the k-th child of a level is accepted with chances[k].

    In every fourth round the last `trim` levels are drafted but not verified.
    """
    rng, row = np.random.default_rng(seed), np.zeros(WIDTH)
    for number in range(rounds):
        deep = gamma - trim if number % 4 == 0 else gamma
        picks = [int(rng.choice(len(chances) + 1, p=[*chances, 1 - sum(chances)])) for _ in range(deep)]
        accepted = next((i for i, pick in enumerate(picks) if pick == len(chances)), deep)
        tested = min(accepted + 1, deep)
        first = tuple(int(pick == 0) for pick in picks[:tested])
        stats = SpeculationStats(
            rounds=1,
            drafted=gamma * len(chances),
            verified=deep * len(chances),
            levels=deep,
            accepted=accepted,
            emitted=accepted + 1,
            tested=tested,
            first_accepted=sum(first),
            lengths=(0,) * (accepted + 1) + (1,),
            level_tested=(1,) * tested,
            level_first=first,
            level_accepted=(1,) * accepted,
            ranks=tuple(picks[:accepted].count(k) for k in range(len(chances))),
        )
        add_stats(row, stats)
    return row[None]


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_independent_acceptance_gives_the_closed_forms(alpha: float, gamma: int) -> None:
    row = ideal(alpha, gamma)
    tau = expected_tau(alpha, gamma)
    assert measures.alpha(row) == pytest.approx(alpha)
    assert measures.tau(row) == pytest.approx(tau)
    assert measures.speedup(row) == pytest.approx(tau / (1 + 0.05 * gamma))
    assert measures.se(row) == pytest.approx(alpha * tau)
    assert measures.node_yield(row) == measures.draft_efficiency(row) == pytest.approx((tau - 1) / gamma)
    assert measures.survival(row)[0, :gamma] == pytest.approx(alpha)
    assert measures.level_acceptance(row) == pytest.approx(alpha)
    assert np.isnan(measures.survival(row)[0, gamma:]).all()


@pytest.mark.parametrize(
    ("alpha", "gamma", "speedup"),
    [(0.5, 3, 1.63), (0.6, 4, 1.92), (0.7, 6, 2.35), (0.8, 8, 3.09), (0.9, 13, 4.67)],
)
@pytest.mark.parametrize("drafted", [3, LEVELS])  # what lies deeper follows from what was seen
def test_the_best_gamma_is_that_of_the_table_in_section_2(
    alpha: float, gamma: int, speedup: float, drafted: int
) -> None:
    best, value, low = depth.best_gamma(ideal(alpha, drafted), 16)
    assert best == [gamma]
    assert value == pytest.approx(speedup, abs=0.005)
    assert 1 < low[0] < value[0]


def test_the_best_gamma_stays_within_what_each_key_may_use() -> None:
    rows = np.concatenate([ideal(0.9), ideal(0.9), ideal(0.5)])
    best, value, _ = depth.best_gamma(rows, np.array([16, 5, 5]))
    assert best.tolist() == [13, 5, 3]
    assert value[1] == pytest.approx(expected_tau(0.9, 5) / 1.25)


def test_a_lucky_test_of_a_deep_level_does_not_deepen_the_draft() -> None:
    row = ideal(0.5, 3, rounds=200)
    row[0, VECTOR["level_tested"]][3:6] = row[0, VECTOR["level_first"]][3:6] = 1
    assert depth.best_gamma(row, 16)[0][0] <= 4


def test_few_tests_widen_the_bound_of_the_best_speedup() -> None:
    lows = [depth.best_gamma(ideal(0.7, 6, rounds=n), 6)[2][0] for n in (50, 500, 50_000)]
    assert lows == sorted(lows)
    assert lows[0] < 0.8 * lows[2]


def test_the_bound_of_the_best_speedup_holds_in_nearly_every_sample() -> None:
    truth = expected_tau(0.6, 4) / 1.2
    rng = np.random.default_rng(5)
    rows = np.repeat(ideal(0.6, 4, rounds=100), 2000, axis=0)
    arrived = np.full(2000, 100)
    for level in range(4):
        rows[:, VECTOR["level_tested"].start + level] = arrived
        arrived = rng.binomial(arrived, 0.6)
        rows[:, VECTOR["level_first"].start + level] = arrived
    levels = rows[:, VECTOR["level_tested"]], rows[:, VECTOR["level_first"]]
    rows[:, COLUMN["tested"]], rows[:, COLUMN["first_accepted"]] = (each.sum(1) for each in levels)
    gamma, _, low = depth.best_gamma(rows, 4)
    missed = (low > truth)[gamma == 4].mean()
    assert missed < 0.01
    assert 0.8 < np.median(low / truth) < 0.95


def test_a_tree_counts_any_child_and_a_chain_the_first() -> None:
    row = simulated(2, [0.4, 0.2, 0.1], gamma=4, rounds=3000)
    row[0, [COLUMN["base_s"], COLUMN["extra_s"]]] = 3000 * STEP_S, 3000 * 4 * 0.05 * STEP_S
    chain, tree = depth.best_gamma(row, 16), depth.best_gamma(row, 16, tree=True)
    assert chain[0][0] in (2, 3) and tree[0][0] in (5, 6, 7)
    assert chain[1] == pytest.approx(1.46, abs=0.1)
    assert tree[1] == pytest.approx(2.35, abs=0.15)


def test_the_cost_of_a_level_is_that_of_all_its_children() -> None:
    row = simulated(3, [0.4, 0.2], gamma=5, rounds=2000)
    row[0, [COLUMN["base_s"], COLUMN["extra_s"]]] = 2000 * STEP_S, 2000 * 5 * 0.07 * STEP_S
    assert depth.level_cost(row) == pytest.approx(0.07)


def test_simulated_rounds_stay_within_three_standard_errors() -> None:
    rows = np.concatenate([simulated(seed, [0.6], gamma=4, rounds=60) for seed in range(150)])
    low, high = measures.tau_bounds(rows)
    truth = expected_tau(0.6, 4)
    within = (low < truth) & (truth < high)
    assert within.mean() > 0.97
    emitted = rows[0, COLUMN["emitted"]] / 60
    variance = (rows[0, COLUMN["emitted_squared"]] - 60 * emitted**2) / 59
    assert high[0] - low[0] == pytest.approx(6 * np.sqrt(variance / 60))


def test_the_bounds_of_the_speedup_are_those_of_tau() -> None:
    row = simulated(1, [0.6], gamma=4, rounds=100)
    row[0, [COLUMN["base_s"], COLUMN["extra_s"]]] = 2.0, 1.0
    bounds = zip(measures.speedup_bounds(row), measures.tau_bounds(row), strict=True)
    assert all(of_s == pytest.approx(of_tau * 2 / 3) for of_s, of_tau in bounds)


def test_nothing_told_is_nan_and_gamma_0() -> None:
    empty = np.zeros((2, WIDTH))
    nobody = np.zeros(2, bool)
    told = [measures.alpha(empty), measures.tau(empty), measures.speedup(empty), measures.node_yield(empty)]
    told += [measures.fallback_rate(empty, nobody), measures.tpot_quantile(empty, 0.5), measures.width(empty)]
    told += [*measures.tau_bounds(empty), measures.tree_width_effective(empty), measures.se(empty)]
    gamma, *values = depth.best_gamma(empty, 8)
    assert gamma.tolist() == [0, 0]
    assert np.isnan(told + values).all()
    assert measures.survival(empty).shape == (2, LEVELS)


def test_one_round_has_no_bounds() -> None:
    assert np.isnan(measures.tau_bounds(simulated(0, [0.5], gamma=2, rounds=1))).all()


def test_fallbacks_of_a_lost_worker_can_stay_out() -> None:
    rows = np.zeros((3, WIDTH))
    rows[:, COLUMN["planned"]] = 100, 100, 30
    rows[:, COLUMN["worker_lost"]] = 30
    rows[:, COLUMN["kv"]] = 2, 2, 0
    rates = measures.fallback_rate(rows, np.array([False, True, True]))
    assert rates == pytest.approx([0.32, 2 / 70, np.nan], nan_ok=True)


@pytest.mark.parametrize("chances", [[0.5], [0.4, 0.2, 0.1], [0.6, 0.02, 0.0, 0.0]])
@pytest.mark.parametrize("trim", [0, 1])
def test_the_width_follows_from_nodes_and_levels(chances: list[float], trim: int) -> None:
    row = simulated(4, chances, gamma=4, rounds=2000, trim=trim)
    assert measures.width(row) == [len(chances)]


def test_a_chain_that_is_never_accepted_to_its_end_is_no_tree() -> None:
    assert measures.width(simulated(4, [0.1], gamma=8, rounds=200)) == [1]


@pytest.mark.parametrize(
    ("ranks", "effective"), [((95, 5, 0, 0), 1), ((90, 5, 5, 0), 2), ((70, 20, 5, 5), 3)]
)
def test_effective_width_covers_95_percent_of_the_accepted(ranks: tuple[int, ...], effective: int) -> None:
    row = np.zeros((1, WIDTH))
    row[0, COLUMN["verified"]] = 400
    row[0, COLUMN["levels"]] = 100
    row[0, VECTOR["ranks"]][:4] = ranks
    assert measures.width(row) == [4]
    assert measures.tree_width_effective(row) == pytest.approx(effective / 4)


@pytest.mark.parametrize("q", [0.05, 0.5, 0.95, 0.99])
def test_quantiles_of_the_time_per_token_are_near_the_exact_ones(q: float) -> None:
    seconds = np.random.default_rng(6).lognormal(np.log(0.03), 0.4, 20_000)
    rows = np.zeros((2, WIDTH))
    rows[0, VECTOR["tpot"]] = np.bincount(np.searchsorted(TPOT_EDGES, seconds), minlength=64)
    rows[1, VECTOR["tpot"]][10] = 7
    found = measures.tpot_quantile(rows, q)
    assert found[0] == pytest.approx(np.quantile(seconds, q), rel=0.03)
    assert found[1] == pytest.approx(TPOT_EDGES[9] * (TPOT_EDGES[10] / TPOT_EDGES[9]) ** q)


def test_times_beyond_the_histogram_count_as_its_edges() -> None:
    rows = np.zeros((2, WIDTH))
    rows[0, VECTOR["tpot"]][63] = rows[1, VECTOR["tpot"]][0] = 1
    slow, fast = measures.tpot_quantile(rows, 0.9)
    assert slow == pytest.approx(TPOT_EDGES[-1])
    assert TPOT_EDGES[0] ** 2 / TPOT_EDGES[1] < fast < TPOT_EDGES[0]


def test_reuse_and_draft_latency_come_from_the_phases() -> None:
    phases = Phases(draft_s=0.4, seen=1000, reused=700)
    assert measures.kv_reuse(phases) == (0.7, None)
    row = ideal(0.5, gamma=4, rounds=50)
    assert measures.draft_latency(phases, row) == pytest.approx(0.4 / 200 / STEP_S)
    assert measures.draft_latency(phases, np.zeros((1, WIDTH))) is None
