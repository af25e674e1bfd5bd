"""Chi-square of a drafter under rejection verification, through the whole engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
from scipy.stats import chisquare

from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.types import GenerateRequest, SamplingParams, SpeculationPlan

from .decoding import run
from .tape import Letters, TapeRunner

VOCAB = 8
PROMPT = (1, 2, 3, 4)
TRIALS = 3000
SAMPLING = SamplingParams(temperature=1.2, min_p=0.02, max_tokens=4)


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
