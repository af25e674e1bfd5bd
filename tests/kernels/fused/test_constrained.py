"""Constraints inside kernels against `Constraints.apply`, bit by bit, at every node of a tree.

Catches: penalties that count a node's siblings instead of its path, a bias added before a ban, an end held
back although nothing else is left, a mask of the parent, an edited copy that overwrites the raw logits.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decoding import Cycle
from support.draft_trees import BY_LEVELS, fused, launched, parents_of, truth

from gammaray.engine import packing
from gammaray.engine.constraints import Constraints
from gammaray.engine.drafters.base import DraftTree
from gammaray.engine.verifier import VerifyJob
from gammaray.errors import EngineFailure
from gammaray.kernels.fused import logits as processing
from gammaray.kernels.verification import VerifyWorkspace
from gammaray.types import SamplingParams

VOCAB = 40  # more than one word of a mask
EOS = 39
TOKENS = st.integers(0, 5)
SAMPLING = st.builds(
    SamplingParams,
    min_tokens=st.sampled_from([0, 3]),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.5, 2.0])).map(lambda b: tuple(b.items())),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.4]),
    seed=st.integers(0, 2**64 - 1),
)


def paths(tree: DraftTree) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append([*found[parent + 1], token])
    return found


def edited(rows: torch.Tensor, jobs: list[VerifyJob]) -> torch.Tensor:
    """Rows [N, V] as the kernel leaves them."""
    batch = packing.pack(jobs, rows.shape[1])
    workspace = VerifyWorkspace.of(batch.size, chunk=16)
    workspace.scratch.fill_(float("nan"))
    before = rows.clone()
    processing.constrain(rows, workspace.rows, batch, workspace)
    assert torch.equal(rows, before), "log-probabilities are reported of the raw logits"
    return workspace.scratch


def by_apply(rows: torch.Tensor, jobs: list[VerifyJob]) -> torch.Tensor:
    expected, at = rows.float().clone(), 0
    for job in jobs:
        for path in paths(job.tree or DraftTree((), ())):
            job.constraints.apply(expected[at], path)
            at += 1
    return expected


@settings(max_examples=20)
@given(
    sampling=SAMPLING,
    prompt=st.lists(TOKENS, min_size=1, max_size=4),
    output=st.lists(TOKENS, max_size=4),
    seed=st.integers(0, 10**6),
)
def test_each_node_is_edited_as_its_path_says(sampling, prompt, output, seed):
    rng = random.Random(seed)
    rules = Constraints(sampling, prompt, [EOS, 5], VOCAB)
    for token in output:
        rules.advance(token)
    parents = parents_of(rng, 4)
    tree = DraftTree(tuple(rng.randrange(6) for _ in parents), tuple(parents))
    jobs = [VerifyJob(tree, sampling, 0, 9, "coupled", rules)]
    rows = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    torch.testing.assert_close(edited(rows, jobs), by_apply(rows, jobs), rtol=0, atol=0)


def test_the_ends_stay_where_nothing_else_is_left():
    sampling = SamplingParams(min_tokens=4, logit_bias=((EOS, 1.5),))
    job = VerifyJob(None, sampling, 0, 9, "coupled", Constraints(sampling, [0], [EOS], VOCAB))
    row = torch.full((1, VOCAB), float("-inf"))
    row[0, EOS] = 1.0
    assert edited(row, [job])[0, EOS] == 2.5
    row[0, 7] = -50.0
    assert edited(row, [job])[0, EOS] == float("-inf")


@pytest.mark.parametrize("levels", [packing.NOTHING, BY_LEVELS], ids=["at once", "by levels"])
def test_verdicts_under_a_grammar_and_penalties(levels):
    """Two jobs with a grammar each, at different places of it, one without, and a raw log-probability."""
    generator = torch.Generator().manual_seed(4)
    jobs, rows = [], torch.randn(11, VOCAB, generator=generator)
    for taken in (0, 2):
        sampling = SamplingParams(seed=taken, repetition_penalty=1.3, min_tokens=3, logprobs=0, top_k=5)
        rules = Constraints(sampling, [3, 4], [EOS], VOCAB, Cycle([1, 2, 3], VOCAB, EOS))
        for token in (1, 2)[:taken]:
            rules.advance(token)
        tree = DraftTree((1, 2, 3, EOS) if not taken else (3, 1, 4, 2), (-1, 0, 1, 2))
        jobs.append(VerifyJob(tree, sampling, 0, 9, "coupled", rules))
    jobs.append(VerifyJob(None, SamplingParams(), 0, 9, "coupled"))
    expected = truth(rows, jobs)
    assert fused(rows, jobs, levels) == expected
    assert max(len(verdict.path) for verdict in expected) >= 3
    raw = rows.log_softmax(-1)
    found = launched(rows, jobs, levels).logprobs[0, 0]
    assert float(found) == pytest.approx(float(raw[0, expected[0].tokens[0]]), abs=1e-6)


def test_masks_are_packed_bit_by_bit():
    """Catches: the sign bit of a word lost, bits in the other order, a last word that is not whole."""
    mask = torch.rand(3, 70, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[0] = True
    words = packing._bits(mask, 3)
    token = torch.arange(70)
    assert words.shape == (3, 3) and torch.equal(((words[:, token // 32] >> (token % 32)) & 1).bool(), mask)


class Broken(Cycle):
    """Gives up behind its second token."""

    def mask(self):
        if self.state >= 2:
            raise EngineFailure("too much work")
        return super().mask()


def test_a_grammar_that_gives_up_fails_its_own_job_where_it_does():
    rows = torch.zeros(5, VOCAB)
    rows[0, 1] = rows[1, 2] = 1.0
    sampling = SamplingParams(temperature=0.0)

    def jobs():
        rules = Constraints(sampling, [0], [EOS], VOCAB, Broken([1, 2, 3], VOCAB, EOS))
        tree = DraftTree((1, 2, 3), (-1, 0, 1))
        return [VerifyJob(tree, sampling, 0, 1, "coupled", rules), VerifyJob(None, sampling, 0, 1, "coupled")]

    verdicts = fused(rows, jobs())
    assert verdicts == truth(rows, jobs())
    assert [v.failed for v in verdicts] == [True, False] and verdicts[0].path == (0, 1)
