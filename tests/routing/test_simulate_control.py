"""The benchmark of the control loop in small: what is counted, and what the adaptation gains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.crowd.costs import MOST_DEPTH, Costs
from support.crowd.plans import DRAFTER
from support.crowd.rounds import Texts, nothing, runs, serve, serve_one
from support.crowd.traffic import INTERVAL_S, Traffic
from support.crowd.trial import Setup, Trial

from gammaray.routing.window import COLUMN, VECTOR, Window

TENANTS, REPLICAS, TICKS = 50, 2, 8
ROOT = Path(__file__).resolve().parents[2]


class Told(Trial):
    """Keeps the windows."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.windows: list[list[Window]] = []

    def _serve(self, number: int) -> list[Window]:
        told = super()._serve(number)
        self.windows.append(list(told))
        return told


@pytest.fixture(scope="module")
def trial() -> Told:
    made = Told(Setup(TENANTS, REPLICAS, TICKS, sampled=TENANTS))
    made.run()
    return made


def texts(alpha: float, node_s: float = 0.001, count: int = 300, length: int = 80) -> Texts:
    rng = np.random.default_rng(1)
    tokens = rng.integers(2, length + 1, count)
    accepted = rng.random((count, length)) < alpha
    return Texts(runs(accepted), tokens, np.full(count, 0.01), np.full(count, node_s))


@pytest.mark.parametrize("alpha", [0.05, 0.12, 0.3, 0.45, 0.62, 0.9])
@pytest.mark.parametrize("node_s", [0.0001, 0.002])
def test_the_array_breaker_is_the_engines(alpha: float, node_s: float) -> None:
    these = texts(alpha, node_s)
    depth = np.arange(len(these.tokens)) % (MOST_DEPTH + 1)
    together, alone = serve(these, depth, adaptive=True), nothing(len(depth))
    for i in range(len(depth)):
        serve_one(alone, i, these, int(depth[i]))
    for name in ("plain", "drafted", "tests", "hits", "broke"):
        assert (getattr(together, name) == getattr(alone, name)).all(), name
    if (alpha, node_s) == (0.12, 0.002):
        assert 0 < together.broke.sum() < len(depth)


@pytest.mark.parametrize("adaptive", [False, True])
def test_every_token_is_emitted_once(adaptive: bool) -> None:
    these = texts(0.4)
    for depth in (0, 1, 5):
        done = serve(these, np.full(len(these.tokens), depth), adaptive)
        assert (done.plain + done.hits @ np.arange(1, MOST_DEPTH + 2) == these.tokens).all()


def test_seconds_by_hand() -> None:
    """Six tokens, the first four accepted: at depth 2 these are rounds of three and two, and a plain one."""
    these = Texts(
        runs(np.array([[True, True, True, True, False, False]])), np.array([6]), np.ones(1), np.ones(1)
    )
    done = serve(these, np.array([2]), adaptive=False)
    assert (done.drafting.tolist(), done.plain.tolist(), done.drafted.tolist()) == ([2], [1], [4])
    costs = Costs(fixed_s=0.008, token_s=0.001, level_s=0.002)
    assert done.seconds(costs, np.array([4.0])).tolist() == pytest.approx([3 * 0.003 + 4 * 0.0015])


def test_the_best_depth_by_enumeration() -> None:
    costs, alpha, batch = Costs(), np.array([0.05, 0.3, 0.62, 0.8]), np.array([40.0, 20.0, 16.0, 4.0])
    c = costs.node_s(batch) / costs.round_s(batch)
    speedups = [(1 - alpha ** (g + 1)) / (1 - alpha) / (1 + g * c) for g in range(MOST_DEPTH + 1)]
    best = costs.best_depth(alpha, batch)
    assert best.tolist() == np.argmax(speedups, axis=0).tolist()
    assert best[0] == 0 < best[1] <= best[2] < best[3]


def test_windows_tell_of_all_that_was_served(trial: Told) -> None:
    again = Traffic(TENANTS, REPLICAS, TICKS, trial.setup.misled, trial.setup.seed)
    for number, told in enumerate(trial.windows):
        requests = again.tick(number)
        counts = np.concatenate([window.counts for window in told])
        total = counts.sum(0)
        assert total[COLUMN["emitted"]] == total[COLUMN["output_tokens"]] == requests.tokens.sum()
        assert total[COLUMN["finished"]] == len(requests.tenant) == total[VECTOR["tpot"]].sum()
        assert total[COLUMN["tested"]] == total[VECTOR["level_tested"]].sum()
        assert total[COLUMN["accepted"]] == total[VECTOR["level_first"]].sum()
        assert sum(len(window.finished) for window in told) == len(requests.tenant)
        assert {key[0] for window in told for key in window.keys} == set(trial.names)


def test_each_replica_tells_once_a_tick_and_each_key_once(trial: Told) -> None:
    for number, told in enumerate(trial.windows):
        assert [(w.source, w.number) for w in told] == [(f"replica-{i}", number + 1) for i in range(REPLICAS)]
        assert all(len(set(window.keys)) == len(window.keys) == len(window.counts) for window in told)


def test_a_tenant_lives_on_few_replicas() -> None:
    traffic = Traffic(200, 40, 5, 0.0, seed=3)
    homes = [set[int]() for _ in range(200)]
    for number in range(5):
        requests = traffic.tick(number)
        assert set(requests.tenant.tolist()) == set(range(200))
        assert 0 <= requests.at.min() <= requests.at.max() <= INTERVAL_S
        for tenant, replica in zip(requests.tenant.tolist(), requests.replica.tolist(), strict=True):
            homes[tenant].add(replica)
    assert max(map(len, homes)) == 3


def test_the_arms_are_in_order(trial: Told) -> None:
    """What knows more is better, and drafting pays; the adaptive arm is near the top."""
    goodput = trial.arms.goodput()
    assert trial.arms.requests == trial.requests  # as all are sampled
    best = goodput[trial.arms.best_fixed()]
    assert goodput["hindsight"] > goodput["oracle"] > best > 1.2 * goodput[0]
    assert goodput["oracle"] > goodput["adaptive"] > 0.89 * goodput["oracle"]


def test_without_a_predictor_the_requests_are_the_same(trial: Told) -> None:
    blind = Trial(Setup(TENANTS, REPLICAS, TICKS, sampled=TENANTS, predictor=False))
    blind.run()
    assert blind.predictors == 0 < trial.predictors
    assert blind.arms.goodput()[0] == trial.arms.goodput()[0]
    assert blind.arms.goodput()["adaptive"] != trial.arms.goodput()["adaptive"]


def test_the_crowd_plans_as_the_router_does() -> None:
    """With all tenants sampled and with hardly any, as much is planned and drafted once there is a predictor,
    but for chance."""
    found = []
    for sampled in (TENANTS, 1):
        made = Told(Setup(TENANTS, REPLICAS, 20, sampled=sampled))
        made.run()
        assert made.predictors
        later = [window for told in made.windows[10:] for window in told]
        counts = np.concatenate([window.counts for window in later])
        is_drafting = [key[2] == DRAFTER for window in later for key in window.keys]
        planned, finished, drafted = (counts[:, COLUMN[n]].sum() for n in ("planned", "finished", "drafted"))
        assert planned == counts[is_drafting, COLUMN["planned"]].sum()
        found.append((planned / finished, drafted / counts[is_drafting, COLUMN["rounds"]].sum()))
    (share, depth), (share_2, depth_2) = found
    assert share == pytest.approx(share_2, abs=0.1) and 0.3 < share < 0.8
    assert depth == pytest.approx(depth_2, rel=0.1) and 2 < depth < 6


def test_the_last_line_is_json(tmp_path: Path) -> None:
    command = [
        sys.executable, str(ROOT / "benchmarks" / "simulate_control.py"), "--tenants", "30",
        "--replicas", "2", "--ticks", "3", "--sampled", "30", "--json", "--out", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"tick_ms_p99", "snapshot_bytes", "goodput_vs_oracle"} <= found.keys()
    assert (found["tenants"], found["replicas"], found["ticks"]) == (30, 2, 3)
    assert 0.5 < found["goodput_vs_oracle"] <= 1.05
    parts = found["parts_ms_p99"]
    assert max(parts["fold"], parts["tick"]) <= found["tick_ms_p99"] == parts["fold and tick"]
    page = (tmp_path / "simulate_control.md").read_text()
    assert "| adaptive |" in page and "--tenants 30" in page
