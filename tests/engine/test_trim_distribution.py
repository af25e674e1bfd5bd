"""Trimming sampled drafts under rejection keeps the target's joint distribution, through the whole engine.

Target and drafter are Markov chains, so that the confidence of a drafted token hangs on the token drawn
before it and nothing else. The rule for deterministic drafts, used on these, shows that the test can fail: it
admits the first token more readily when the second is a likely one, and so looks at what was drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from support.decoding import run
from support.tape import Letters

from gammaray.engine import trimmer
from gammaray.engine.batch import Row
from gammaray.engine.breaker import HOT
from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.logits import draw_children
from gammaray.engine.profile import StepProfile
from gammaray.types import GenerateRequest, SamplingParams, SpeculationPlan, SpeculationStats

VOCAB, PROMPT, TRIALS = 4, 0, 600
TARGET = torch.tensor([[3.0, 2, 3, 2], [4, 3, 2, 1], [2, 2, 4, 2], [3, 1, 4, 2]]).log()  # by the last token
DRAFT = TARGET.clone()
DRAFT[1::2] = torch.tensor([[1.0, 1, 1, 30], [1, 30, 1, 1]]).log()  # bad guesses behind odd tokens
SURE = (0.95, 0.2, 0.95, 0.2)  # its confidence behind each token


class Chain:
    """Speaks ModelRunner: logits by the token alone."""

    dtype, device, num_layers = torch.float32, torch.device("cpu"), 1
    num_blocks, block_size, vocab_size, max_model_len = 64, 4, VOCAB, 32

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        wanted = [
            [*row.pending[max(0, len(row.pending) - row.logits) :], *row.tree_tokens]
            for row in rows
            if row.logits
        ]
        return HOT * TARGET[[token for tokens in wanted for token in tokens]]

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None: ...


class ChainDrafter:
    """Draws from q, with noise of its own, and is surer behind even tokens."""

    vocab_size: int | None = VOCAB

    def __init__(self) -> None:
        self._tokens: dict[str, list[int]] = {}

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views))

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        return {view.rid: self._draft(view) for view in ticket.views}

    def _draft(self, view: DraftView) -> DraftTree:
        path, q = [self._tokens[view.rid][-1]], []
        for level in range(view.depth):
            token, ids, probs = draw_children(
                DRAFT[path[-1:]].log_softmax(-1),
                [view.sampling],
                [view.sequence],
                [view.length + level],
                width=1,
                drawn="iid",
                coupled=view.coupled,
            )
            path.append(int(token))
            q.append((ids[0], probs[0]))
        sure = tuple(SURE[token] for token in path[:-1])
        parents = tuple(range(-1, view.depth - 1))
        ids, probs = (torch.stack(part) for part in zip(*q, strict=True))
        return DraftTree(tuple(path[1:]), parents, "iid", ids, probs, sure)

    def commit(self, rid: str, tokens: Sequence[int], features: torch.Tensor | None = None) -> None:
        self._tokens[rid] += tokens

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        self._tokens[rid] = list(tokens)

    def release(self, rid: str) -> None:
        self._tokens.pop(rid, None)

    def length(self, rid: str) -> int | None:
        return len(self._tokens[rid]) if rid in self._tokens else None


def p_value(batch: int, profile: StepProfile, tokens: int = 3) -> float:
    """Chi-square of the first tokens of TRIALS requests."""
    options = EngineOptions(max_batch=batch, token_budget=200, max_waiting=TRIALS)
    engine = Engine(Chain(), Letters(), (), {"draft": ChainDrafter()}, options, profile=profile)  # type: ignore[arg-type]
    plan = SpeculationPlan("draft", 2, 1, "rejection", adaptive=True)
    sampling = [SamplingParams(temperature=HOT, max_tokens=4, seed=seed) for seed in range(TRIALS)]
    outcomes = run(
        engine, [GenerateRequest(str(seed), (PROMPT,), one, plan) for seed, one in enumerate(sampling)]
    ).values()
    stats = sum((outcome.stats for outcome in outcomes if outcome.stats), SpeculationStats())
    assert stats.accepted > TRIALS / 10 and stats.verified < 0.95 * stats.drafted
    found = Counter(tuple(outcome.ids[:tokens]) for outcome in outcomes)
    p = TARGET.double().softmax(-1).numpy()
    cells = list(product(range(VOCAB), repeat=tokens))
    expected = np.array([np.prod([p[pair] for pair in pairwise((PROMPT, *cell))]) for cell in cells])
    return float(chisquare([found[cell] for cell in cells], TRIALS * expected).pvalue)


# One token alone never pays; two do on average, or only where both are likely.
EASY = StepProfile(((1, 1.0), (3, 1.8), (64, 9.0)), stepped=True)
HARD = StepProfile(((1, 1.0), (3, 2.3), (64, 9.0)), stepped=True)
CROWD = StepProfile(((8, 1.0), (16, 1.6), (64, 6.4)))


@pytest.mark.parametrize(("batch", "profile"), [(1, EASY), (8, CROWD)], ids=["alone", "crowd"])
def test_trimmed_sampled_drafts_have_the_targets_distribution(batch: int, profile: StepProfile) -> None:
    assert p_value(batch, profile) > 1e-3


def test_an_admission_that_looks_at_what_was_drawn_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trimmer, "_is_sampled", lambda sequence, tree: False)
    assert p_value(1, HARD, tokens=2) < 1e-6
