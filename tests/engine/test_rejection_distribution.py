"""Rejection verification through the whole engine: three tokens have the target's own joint distribution.

test_verifier_distribution.py proves the rules; this proves that drafter, scheduler and engine hand them the
right noise, positions and q. A planted error shows that the test can fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from scipy.stats import chisquare
from support.decoding import run
from support.tape import Letters, TapeRunner

from gammaray.engine.drafters.base import DraftTree, Ticket
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.types import GenerateRequest, SamplingParams, SpeculationPlan

VOCAB = 8
PROMPT = (1, 2, 3, 4)
TRIALS = 3000
SAMPLING = SamplingParams(temperature=1.2, min_p=0.02, max_tokens=4)


class Overconfident(ModelDrafter):
    """Reports a q that it did not draw from: the planted error."""

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        trees = super().collect(ticket, deadline)
        return {rid: replace(tree, q_probs=_sharpen(tree)) for rid, tree in trees.items()}


def _sharpen(tree: DraftTree):  # type: ignore[no-untyped-def]
    assert tree.q_probs is not None
    sharp = tree.q_probs**3
    return sharp / sharp.sum(-1, keepdim=True)


@cache
def expected() -> dict[tuple[int, ...], float]:
    """P(the three tokens after the first), given the first token of the request's fixed prompt."""
    runner = TapeRunner(VOCAB)
    joint: dict[tuple[int, ...], float] = {}
    for tokens in product(range(VOCAB), repeat=4):
        logits, _ = runner.dense([*PROMPT, *tokens[:3]])
        p = 1.0
        for row, token in zip(logits[-4:].double().numpy() / SAMPLING.temperature, tokens, strict=True):
            weights = np.exp(row - row.max())
            weights[weights < SAMPLING.min_p] = 0.0
            p *= weights[token] / weights.sum()
        joint[tokens[1:]] = joint.get(tokens[1:], 0.0) + p
    return joint


def p_value(kind: type[ModelDrafter], gamma: int, width: int) -> float:
    """Chi-square of TRIALS requests against the exact joint distribution."""
    drafter = kind(TapeRunner(VOCAB, blocks=512, noise=1.0), draft_sampling=True)
    engine = Engine(
        TapeRunner(VOCAB, blocks=512),
        Letters(),
        drafters={"draft": drafter},
        options=EngineOptions(max_batch=100, token_budget=2000, max_waiting=10_000),
    )
    plan = SpeculationPlan("draft", gamma, width, "rejection")
    outcomes = run(
        engine,
        [GenerateRequest(str(i), PROMPT, replace(SAMPLING, seed=i), plan) for i in range(TRIALS)],
    )
    assert sum(outcome.stats.accepted for outcome in outcomes.values() if outcome.stats) > TRIALS / 2
    found = Counter(tuple(outcome.ids[1:]) for outcome in outcomes.values())
    cells = sorted(expected().items(), key=lambda cell: -cell[1])
    common = [tokens for tokens, p in cells if p * TRIALS >= 5]
    counts = [found[tokens] for tokens in common]
    shares = [p * TRIALS for _, p in cells[: len(common)]]
    rest = [TRIALS - sum(counts)], [TRIALS - sum(shares)]
    return float(chisquare(counts + rest[0], shares + rest[1]).pvalue)


@pytest.mark.parametrize("gamma, width", [(3, 1), (2, 3)], ids=["chain", "tree"])
def test_the_joint_distribution_is_the_targets(gamma: int, width: int) -> None:
    assert p_value(ModelDrafter, gamma, width) > 1e-3


@pytest.mark.parametrize("gamma, width", [(3, 1), (2, 3)], ids=["chain", "tree"])
def test_a_drafter_that_reports_another_q_is_found_out(gamma: int, width: int) -> None:
    assert p_value(Overconfident, gamma, width) < 1e-6
