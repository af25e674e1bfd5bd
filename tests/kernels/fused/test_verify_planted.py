"""Wrong rules, planted into the kernels, change verdicts; the right ones give the torch verifier's.

Chi-square tests of the torch verifier show that its rules keep the target's distribution; equality carries
that over to the kernels. Here each classic mistake must break equality, or the tests would not see it.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from support.draft_trees import fused, truth

from gammaray.engine.drafters.base import DraftTree
from gammaray.engine.verifier import VerifyJob
from gammaray.kernels.fused import emit, rules
from gammaray.types import SamplingParams

P = [0.05, 0.1, 0.15, 0.3, 0.2, 0.1, 0.06, 0.04]
Q = [0.5, 0.2, 0.1, 0.1, 0.05, 0.05]  # prefers the wrong end; the last two tokens are outside


def jobs_of(drawn: str, tokens: tuple[int, ...], parents: tuple[int, ...], count: int = 24):
    ids, probs = torch.arange(len(Q)).expand(len(tokens), -1), torch.tensor(Q).expand(len(tokens), -1)
    tree = DraftTree(tokens, parents, drawn, ids, probs)
    jobs = [VerifyJob(tree, SamplingParams(seed=seed), 0, 0, "rejection") for seed in range(count)]
    return torch.tensor(P).log().repeat(count * (1 + len(tokens)), 1), jobs


CHAIN = jobs_of("iid", (1, 2), (-1, 0))
SIBLINGS = jobs_of("iid", (1, 2, 4), (-1, -1, -1))
REPLACED = jobs_of("without_replacement", (0, 1, 2), (-1, -1, -1))


@triton.jit
def _plain_p(p, q, outside, scale):
    return p, outside, scale


@triton.jit
def _not_normalised(p, q, outside, scale):
    return tl.maximum(p - q, 0.0), outside, scale


@triton.jit
def _always_accepts(p_x, q_x, u):
    return p_x > 0.15


@triton.jit
def _q_unchanged(q, same):
    return q


@triton.jit
def _rejected_duplicates(q, same):
    return tl.where(same, 1e-30, q)


_uniform_at = rules.uniform_at


@triton.jit
def _one_uniform(seed, index, position, sequence, lane):
    return _uniform_at(seed, index * 0, position, sequence, lane)


@triton.jit
def _targets_noise(seed, index, position, sequence, lane):
    return _uniform_at(seed, index, position, sequence, lane * 0)


@triton.jit
def _bonus_from_residual(a, offset, tokens):
    """As if a leaf's q were that of its parent: half of it on token 0."""
    p = tl.exp(offset - a)
    return tl.log(tl.maximum(tl.where(tokens < 3, p - 0.3, p), 1e-30))


@pytest.mark.parametrize("batch", [CHAIN, SIBLINGS, REPLACED], ids=["chain", "iid", "without replacement"])
def test_the_right_rules(batch):
    verdicts = fused(*batch)
    assert verdicts == truth(*batch)
    assert len({verdict.path for verdict in verdicts}) > 1 and len({v.tokens[-1] for v in verdicts}) > 3


@pytest.mark.parametrize(
    ("batch", "module", "name", "wrong"),
    [
        pytest.param(CHAIN, rules, "rejected", _plain_p, id="plain p on rejection"),
        pytest.param(SIBLINGS, rules, "rejected", _not_normalised, id="residual not normalised"),
        pytest.param(CHAIN, rules, "accepts", _always_accepts, id="typical acceptance"),
        pytest.param(SIBLINGS, rules, "uniform_at", _one_uniform, id="one uniform for siblings"),
        pytest.param(CHAIN, rules, "uniform_at", _targets_noise, id="uniforms of another purpose"),
        pytest.param(REPLACED, rules, "without", _q_unchanged, id="without replacement verified as iid"),
        pytest.param(CHAIN, emit, "unseen", _bonus_from_residual, id="bonus from a residual"),
    ],
)
def test_wrong_rules_are_seen(monkeypatch, batch, module, name, wrong):
    monkeypatch.setattr(module, name, wrong)
    assert fused(*batch) != truth(*batch)


def test_iid_verified_as_without_replacement_is_seen():
    rows, jobs = SIBLINGS
    wrong = [VerifyJob(_relabelled(job.tree), job.sampling, 0, 0, "rejection") for job in jobs]
    assert fused(rows, wrong) != truth(rows, jobs)


def _relabelled(tree: DraftTree) -> DraftTree:
    return DraftTree(tree.tokens, tree.parents, "without_replacement", tree.q_ids, tree.q_probs)
