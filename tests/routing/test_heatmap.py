"""Acceptance against prompt length: what is flagged, and where the class is split."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.stats import pearsonr

from gammaray.routing.heatmap import ALPHA_EDGES, PROMPT_EDGES, best_split, heatmap
from gammaray.routing.quality import correlation

Pairs = tuple[np.ndarray, np.ndarray]


def long_prompts_fail(n: int, over: int = 4096, seed: int = 0) -> Pairs:
    """Prompts of 64 to 65,536 tokens; alpha 0.65 up to `over`, 0.15 beyond."""
    rng = np.random.default_rng(seed)
    tokens = np.exp(rng.uniform(np.log(64), np.log(65_536), n)).astype(np.int64)
    return tokens, np.clip(np.where(tokens > over, 0.15, 0.65) + rng.normal(0, 0.05, n), 0, 1)


def test_a_step_at_a_length_is_flagged_and_split_there() -> None:
    tokens, alphas = long_prompts_fail(400)
    seen = heatmap("chat", tokens, alphas)
    assert seen["r"] < -0.7 and seen["flagged"]
    over = seen["suggestion"]["prompt_tokens_over"]
    assert over == tokens[tokens <= 4096].max()
    assert seen["suggestion"] == {"tenant": "chat", "class": "long", "prompt_tokens_over": over}
    assert json.loads(json.dumps(seen)) == seen


def test_every_request_is_counted_in_its_cell() -> None:
    tokens, alphas = np.array([1, 100, 100, 127, 128, 500_000]), np.array([0.0, 0.5, 0.52, 0.999, 1.0, 0.1])
    counts = np.array(heatmap("chat", tokens, alphas)["counts"])
    assert counts.shape == (len(PROMPT_EDGES) - 1, len(ALPHA_EDGES) - 1) and counts.sum() == 6
    cells = {(int(i), int(j)): int(counts[i, j]) for i, j in np.argwhere(counts)}
    assert cells == {(0, 0): 1, (6, 12): 1, (6, 13): 1, (6, 24): 1, (7, 24): 1, (16, 2): 1}


def test_few_samples_and_weak_relations_are_not_flagged() -> None:
    tokens, alphas = long_prompts_fail(99)
    few = heatmap("chat", tokens, alphas)
    assert abs(few["r"]) > 0.7 and not few["flagged"] and few["suggestion"] is None
    tokens, alphas = long_prompts_fail(400)
    shuffled = heatmap("chat", tokens, np.random.default_rng(1).permutation(alphas))
    assert abs(shuffled["r"]) < 0.2 and not shuffled["flagged"]


def test_r_is_pearsons_and_none_where_nothing_varies() -> None:
    tokens, alphas = long_prompts_fail(150)
    assert correlation(np.log(tokens), alphas) == pytest.approx(pearsonr(np.log(tokens), alphas).statistic)
    assert heatmap("chat", np.full(200, 64), np.linspace(0, 1, 200))["r"] is None
    assert heatmap("chat", np.array([], int), np.array([]))["r"] is None


@pytest.mark.parametrize("seed", range(5))
def test_the_split_leaves_the_least_variance_inside(seed: int) -> None:
    tokens, alphas = long_prompts_fail(60, over=1000, seed=seed)

    def inside(over: int) -> float:
        parts = alphas[tokens <= over], alphas[tokens > over]
        return sum(float(((part - part.mean()) ** 2).sum()) for part in parts)

    allowed = [over for over in np.unique(tokens) if 3 <= (tokens > over).sum() <= 57]
    assert best_split(tokens, alphas) == min(allowed, key=inside)


def test_no_split_cuts_off_a_handful() -> None:
    tokens = np.array([100] * 99 + [5000])
    assert best_split(tokens, np.where(tokens > 100, 0.0, 0.9)) is None
