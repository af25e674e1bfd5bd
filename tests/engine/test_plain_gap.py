"""What plain requests pay for those that speculate, in simulated time: 80 % of the batch drafts.

A step feeds at most the token budget, of which drafts take at most 70 % (math.md section 5). So between two
tokens of a plain request pass at most V + D where drafting and verification take turns, and max(V, D) where
they overlap; V is the cost of a whole budget, D that of the deepest draft.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from support.rig import CLOSE, GAMMA, LANGUAGE
from support.simlink import draft_worker, remote
from support.tape import Letters

from gammaray.engine.drafters.base import Drafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.sim import SimClock, SimDevice, StepCost
from gammaray.engine.sim_drafter import OracleDrafter, constant
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan, StepReport

SPECULATIVE, PLAINLY = 52, 12  # 81 %
BUDGET = 320
COST = StepCost(((1, 0.010), (32, 0.010), (512, 0.160)))  # bound by memory, then by arithmetic
ALL, HALF = PLAINLY + SPECULATIVE * (1 + GAMMA), PLAINLY + SPECULATIVE // 2 * (1 + GAMMA)
DRAFT_S = COST.seconds(ALL) / 2  # a third of a step that drafts and verifies


class Crowd:
    """Requests that never end, and the times at which each one got tokens."""

    def __init__(self, asynchronous: bool, drafter: Drafter, clock: SimClock, gamma: int = GAMMA) -> None:
        self.clock, self.gamma = clock, gamma
        device = SimDevice(LANGUAGE, clock, COST, 16_000)
        options = EngineOptions(max_batch=80, token_budget=BUDGET, asynchronous=asynchronous)
        self.engine = Engine(device, Letters(), (), {"small": drafter}, options, clock)
        self.times: dict[str, list[float]] = defaultdict(list)
        self.tokens: dict[str, int] = defaultdict(int)
        self.reports: list[StepReport] = []

    def submit(self, rid: str, prompt: int = 8) -> None:
        plan = PLAIN if rid.startswith("plain") else SpeculationPlan("small", self.gamma, adaptive=False)
        sampling = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
        ids = tuple((len(rid) + i * i) % LANGUAGE.vocab_size for i in range(prompt))
        self.engine.submit(GenerateRequest(rid, ids, sampling, plan))

    def fill(self, speculative: int = SPECULATIVE, plain: int = PLAINLY) -> None:
        for i in range(max(speculative, plain)):
            for kind, count in (("plain", plain), ("draft", speculative)):
                if i < count:
                    self.submit(f"{kind}-{i}")

    def step(self) -> None:
        output = self.engine.step()
        self.reports.append(output.report)
        for chunk in output.chunks:
            self.times[chunk.request_id].append(self.clock())
            self.tokens[chunk.request_id] += len(chunk.ids)

    def measure(self, steps: int) -> tuple[list[float], float]:
        """Gaps between tokens of plain requests, and tokens per second of the others, over further steps."""
        began, before = self.clock(), self._drafted()
        self.times.clear()
        for _ in range(steps):
            self.step()
        gaps = [b - a for rid, at in self.times.items() if rid[0] == "p" for a, b in pairwise(at)]
        assert len(gaps) == PLAINLY * (steps - 1)  # a token in every step
        return gaps, (self._drafted() - before) / (self.clock() - began)

    def _drafted(self) -> int:
        return sum(count for rid, count in self.tokens.items() if rid[0] == "d")


def oracle(asynchronous: bool, gamma: int = GAMMA) -> Crowd:
    clock = SimClock()
    drafter = OracleDrafter(LANGUAGE, clock, constant(0.7), DRAFT_S / gamma, beside=asynchronous)
    return Crowd(asynchronous, drafter, clock, gamma)


def settled(crowd: Crowd) -> Crowd:
    crowd.fill()
    for _ in range(12):
        crowd.step()
    return crowd


def test_where_drafting_costs_a_third_of_a_step_the_overlap_gives_44_percent_more() -> None:
    """And plain requests, which wait neither for drafts nor for the other half, get 2.9 times as much."""
    together, overlapped = settled(oracle(False)), settled(oracle(True))
    gaps, speed = together.measure(40)
    assert set(map(round_us, gaps)) == {round_us(COST.seconds(ALL) + DRAFT_S)}
    assert DRAFT_S / (COST.seconds(ALL) + DRAFT_S) == pytest.approx(1 / 3)
    shorter, faster = overlapped.measure(80)
    both = max(COST.seconds(HALF), DRAFT_S)
    assert set(map(round_us, shorter)) == {round_us(both)}
    rounds = (COST.seconds(ALL) + DRAFT_S) / (2 * both)
    assert rounds == pytest.approx(1.437, abs=1e-3)
    assert faster / speed == pytest.approx(rounds, rel=0.02)  # tau differs a little, by chance
    assert max(gaps) / max(shorter) == pytest.approx(2.873, abs=1e-3)


def round_us(seconds: float) -> int:
    return round(1e6 * seconds)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("gamma", [4, 16])
def test_plain_requests_get_a_token_in_every_step_within_the_bound(asynchronous: bool, gamma: int) -> None:
    """Prompts come all the time, and drafts that would take the whole budget several times."""
    crowd = settled(oracle(asynchronous, gamma))
    for prompt in range(6):
        crowd.submit(f"draft-new-{prompt}", prompt=400)
    gaps, _ = crowd.measure(60)
    verify, drafting = COST.seconds(BUDGET), DRAFT_S
    bound = max(verify, drafting) if asynchronous else verify + drafting
    assert max(gaps) <= bound * (1 + 1e-9)
    assert max(gaps) > 0.6 * bound
    nodes = [report.verified_nodes for report in crowd.reports]
    assert 0.3 * BUDGET < max(nodes) <= 0.7 * BUDGET


def test_a_draft_worker_behind_a_link_works_while_the_target_verifies() -> None:
    """The real link: on clocks of its own, a worker is really at work meanwhile, and a round waits for the
    rest only."""
    level_s = DRAFT_S / (2 * GAMMA + 1)
    spent = []
    for asynchronous in (False, True):
        worker, clock = draft_worker(CLOSE, level_s, blocks=16_000), SimClock()
        worker.server.wants_time = lambda: False  # type: ignore[method-assign]
        crowd = settled(Crowd(asynchronous, remote(worker, clock), clock))
        crowd.measure(20)
        last = crowd.reports[-20:]
        assert all(report.verified_nodes for report in last)
        spent.append(sum(report.draft_s for report in last) / 20)
    assert spent[0] == pytest.approx(GAMMA * level_s) and spent[1] == pytest.approx(0.0, abs=1e-9)
