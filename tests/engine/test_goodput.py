"""Goodput of trimmed drafts in simulated time: half of the batch is accepted at 0.9, half at 0.1.

What a fixed depth yields is known exactly (math.md section 2), and one run shows that the device agrees. All
sequences run until a set time.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.tape import Letters

from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.profile import StepProfile
from gammaray.engine.sim import Language, SimClock, SimDevice, StepCost
from gammaray.engine.sim_drafter import OracleDrafter
from gammaray.types import GenerateRequest, SamplingParams, SpeculationPlan

LANGUAGE = Language(16, max_model_len=4000, seed=1)
PLAIN_S = 0.010  # a step of one token
LEVEL_S = 0.02 * PLAIN_S
DEEPEST = 8
GOOD, BAD = 0.9, 0.1
# Bound by memory, then by arithmetic: as a curve, and where a step is padded to powers of two.
CURVE = StepCost(((1, PLAIN_S), (64, 1.05 * PLAIN_S), (256, 1.6 * PLAIN_S), (8192, 46 * PLAIN_S)))
EDGES = StepCost(tuple((2**k, PLAIN_S * (1 + 2**k / 128)) for k in range(14)), stepped=True)
COSTS = {"curve": CURVE, "edges": EDGES}


def ranks(salt: bytes, now: float) -> Sequence[float]:
    return (GOOD,) if salt == b"good" else (BAD,)


def measured(
    batch: int, cost: StepCost, plan: SpeculationPlan, seconds: float, profile: StepProfile | None, told: bool
) -> float:
    """Tokens a second. `told`: the drafter has a confidence, else what it is worth is learned."""
    clock = SimClock()
    device = SimDevice(LANGUAGE, clock, cost, num_blocks=120 * batch)
    drafter = OracleDrafter(LANGUAGE, clock, ranks, LEVEL_S, seed=5, spread=0.0 if told else None)
    options = EngineOptions(max_batch=batch, token_budget=4096, prefix_cache=False)
    engine = Engine(device, Letters(), (), {"sim": drafter}, options, clock, profile=profile)
    for rid in range(batch):
        sampling = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
        prompt, tenant = (rid % 16, rid // 16, 3), "bad" if rid % 2 else "good"
        engine.submit(GenerateRequest(str(rid), prompt, sampling, plan, tenant=tenant))
    engine.step()  # the prompts
    began, tokens = clock(), 0
    while clock() < began + seconds:
        tokens += sum(part.stats.emitted for part in engine.step().report.counts)
    assert engine.cache.pool.used > 0  # none has ended
    return tokens / (clock() - began)


def fixed(batch: int, cost: StepCost, gamma: int) -> float:
    """Expected, in tokens a second, of chains of this depth."""
    bad, fed = batch // 2, batch * (1 + gamma)
    good_tau, bad_tau = (sum(alpha**j for j in range(gamma + 1)) for alpha in (GOOD, BAD))
    return ((batch - bad) * good_tau + bad * bad_tau) / (cost.seconds(fed) + gamma * LEVEL_S)


def trimmed(batch: int, cost: StepCost, seconds: float, told: bool = True) -> float:
    plan = SpeculationPlan("sim", DEEPEST, adaptive=True)
    return measured(batch, cost, plan, seconds, cost, told)


def test_a_fixed_depth_yields_what_is_expected_of_it() -> None:
    found = measured(16, CURVE, SpeculationPlan("sim", 4), 2.0, None, True)
    assert found == pytest.approx(fixed(16, CURVE, 4), rel=0.03)


@pytest.mark.parametrize("told", [True, False], ids=["confidence", "learned"])
@pytest.mark.parametrize("batch", [32, 64])
@pytest.mark.parametrize("name", COSTS)
def test_it_beats_the_best_fixed_depth_where_verifying_costs(batch: int, name: str, told: bool) -> None:
    cost = COSTS[name]
    best = max(fixed(batch, cost, gamma) for gamma in range(DEEPEST + 1))
    assert trimmed(batch, cost, 0.6, told) >= 1.08 * best


@pytest.mark.parametrize(
    ("batch", "name"),
    [(1, "curve"), (2, "edges"), (4, "curve"), (8, "edges"), (16, "curve"), (128, "edges"), (256, "curve")],
)
def test_it_is_never_slower_than_plain_decoding(batch: int, name: str) -> None:
    """Where no draft pays, drafting and surveys are paid for, so they must become rare."""
    cost = COSTS[name]
    seconds = 200 * cost.seconds(batch) if batch >= 128 else 0.5
    assert trimmed(batch, cost, seconds) >= 0.97 * fixed(batch, cost, 0)
