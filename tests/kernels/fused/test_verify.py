"""Verdicts of the kernels equal the torch verifier's, which is the truth: path, ranks, tokens and all.

Noise is the same stream, and rounding differs in the last bit, so that only a near-tie (about one draw in
10^6) could differ; with these fixed seeds none does. Memory is full of NaN before each launch.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.draft_trees import BY_LEVELS, fused, jobs_of, launched, parents_of, tree_of, truth

from gammaray.engine import packing, verifier
from gammaray.engine.drafters.base import DraftTree
from gammaray.engine.logprobs import report
from gammaray.engine.verifier import Verdict, VerifyJob
from gammaray.kernels import verification
from gammaray.kernels.fused import emit, score, thresholds, walk
from gammaray.kernels.fused import logits as logits_kernels
from gammaray.kernels.verification import Size, VerifyBatch, VerifyWorkspace, by_levels
from gammaray.types import SamplingParams

VOCAB = 13
ALWAYS = [0.25] * 4  # q of four tokens that p gives nothing


def logits(*rows: list[float]) -> torch.Tensor:
    """Rows of probabilities, as logits."""
    return torch.tensor(rows).log()


def sampled(tokens, parents, q, drawn="iid", seed=0, temperature=1.0) -> VerifyJob:
    """Every node drawn from q [S], given as probabilities of the first S tokens."""
    n = len(tokens)
    ids, probs = torch.arange(len(q)).expand(n, -1), torch.tensor(q).expand(n, -1)
    sampling = SamplingParams(seed=seed, temperature=temperature)
    return VerifyJob(DraftTree(tuple(tokens), tuple(parents), drawn, ids, probs), sampling, 0, 5, "rejection")


@pytest.mark.parametrize("seed", range(6))
def test_any_tree_rule_and_parameters(seed):
    """Random trees, also none, and rows that failed. Catches most mistakes of score, walk and emit."""
    rows, jobs = jobs_of(seed, 5, VOCAB)
    assert fused(rows, jobs) == truth(rows, jobs)


@pytest.mark.parametrize("seed", [100, 101])
def test_by_levels_and_in_many_chunks(seed):
    """Catches: partials of one slot read for another, shifts of chunks mixed up, a level too few."""
    rows, jobs = jobs_of(seed, 4, 50)
    expected = truth(rows, jobs)
    assert fused(rows, jobs, BY_LEVELS, chunk=64) == expected
    assert fused(rows, jobs, chunk=16) == expected


def test_padding_changes_nothing():
    """A captured graph has room for more. Catches: padding that is walked, emitted or scored."""
    rows, jobs = jobs_of(7, 2, VOCAB, most=4)
    room = Size(4, 14, 0, depth=6, support=20, edits=3, bans=2, masks=1, filters=True, constrains=True)
    padded = torch.cat([rows, torch.full((14 - len(rows), VOCAB), float("nan"))])
    assert fused(padded, jobs, room) == truth(rows, jobs)
    assert fused(padded, jobs, replace(room, levels=True)) == truth(rows, jobs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_16_bits_are_read_as_they_are(dtype):
    rows, jobs = jobs_of(21, 4, VOCAB)
    assert fused(rows.to(dtype), jobs) == truth(rows.to(dtype).float(), jobs)


def test_64_nodes_in_a_chain_and_in_a_bush():
    """Catches: a 65th row, or the last bit of a vector of nodes, left out."""
    rng = random.Random(0)
    chain = tree_of(rng, range(-1, 63), VOCAB, "iid")
    bush = tree_of(rng, [-1] * 64, VOCAB, "iid")
    greedy = SamplingParams(temperature=0.0)
    targets = torch.tensor([*chain.tokens, 3])
    rows = torch.nn.functional.one_hot(targets, VOCAB).float()
    wide = torch.zeros(65, VOCAB)
    bush = replace(bush, tokens=(*[1] * 63, 2))
    wide[0, 2] = 1.0
    jobs = [VerifyJob(tree, greedy, 0, 0, "coupled") for tree in (chain, bush)]
    verdicts = fused(torch.cat([rows, wide]), jobs)
    assert verdicts == truth(torch.cat([rows, wide]), jobs)
    assert verdicts[0].path == tuple(range(64)) and verdicts[1].ranks == (63,)


def test_all_siblings_rejected():
    """p gives the drafted tokens nothing, so p is left, scaled. Catches: tokens of q emitted after all."""
    rows = logits(*[[0.0] * 4 + [0.1, 0.2, 0.3, 0.4]] * 4)
    for drawn in ("iid", "without_replacement"):
        jobs = [sampled((0, 1, 2), (-1, -1, -1), ALWAYS, drawn, seed) for seed in range(3)]
        verdicts = fused(rows.repeat(3, 1), jobs)
        assert verdicts == truth(rows.repeat(3, 1), jobs)
        assert all(v.path == () and v.tested == 1 and v.tokens[0] >= 4 for v in verdicts)


def test_a_residual_without_mass_is_p_itself():
    """q covers p twice over (it is not normalised). Catches: -inf everywhere, and so token 0."""
    rows = logits([0.0, 0.5, 0.5], [1.0, 0.0, 0.0])
    jobs = [sampled((0,), (-1,), [1.0, 1.0, 1.0], seed=seed) for seed in range(6)]
    verdicts = fused(rows.repeat(6, 1), jobs)
    assert verdicts == truth(rows.repeat(6, 1), jobs)
    assert {v.tokens[0] for v in verdicts} == {1, 2}


@pytest.mark.parametrize("impossible", [0, 2])
def test_all_mass_of_p_is_in_the_support(impossible):
    """Sums of p that round to a little below 1. Catches: the rest counted as mass outside of q's support, and
    tokens that cannot be drawn counted as tokens there."""
    generator = torch.Generator().manual_seed(0)
    rows, jobs = [], []
    for seed in range(12):
        p = torch.rand(7, generator=generator).index_fill(0, torch.tensor(0), 0.0)
        own = torch.cat([(p / p.sum()).log(), torch.full((impossible,), float("-inf"))])
        rows.append(own.repeat(2, 1))
        jobs.append(sampled([0], [-1], [1.0] * 7, seed=seed))  # which leaves nothing of p
    assert fused(torch.cat(rows), jobs) == truth(torch.cat(rows), jobs)


def test_warming_up_launches_every_kernel_and_harms_nothing(monkeypatch):
    """Catches: a batch of padding only that a kernel cannot bear."""
    launches = Counter[str]()

    def count(module, name):
        launch = getattr(module, name)

        def counting(*args):
            launches[name] += 1
            launch(*args)

        monkeypatch.setattr(module, name, counting)

    count(logits_kernels, "constrain")
    for module, name in ((thresholds, "cut"), (score, "score"), (walk, "walk"), (emit, "emit")):
        count(module, name)
    verification.warm_up(VOCAB, 64, torch.float32, torch.device("cpu"))
    assert launches == {"constrain": 6, "cut": 6, "score": 6, "walk": 6, "emit": 2}


def test_duplicates_and_children_that_cannot_have_been_drawn():
    """Catches: duplicates merged, q(x) = 0 counted as a rejection, a rank that skips what is passed over."""
    rows = logits(*[[0.05, 0.15, 0.5, 0.3]] * 5)
    jobs = [
        sampled((0, 3, 0, 2), (-1,) * 4, [0.6, 0.3, 0.1, 0.0], drawn, seed)
        for drawn in ("iid", "without_replacement")
        for seed in range(5)
    ]
    verdicts = fused(rows.repeat(10, 1), jobs)
    assert verdicts == truth(rows.repeat(10, 1), jobs)
    assert {v.ranks for v in verdicts} >= {(3,)}, "the second child, of q = 0, counts as one"


def test_failed_rows_end_a_walk_where_they_are():
    """NaN anywhere, nothing finite, and infinity; the same rows off the path do not matter."""
    bad = torch.zeros(5, VOCAB)
    bad[0, 12], bad[1], bad[2, 3] = float("nan"), float("-inf"), float("inf")
    tree, greedy = DraftTree((0,), (-1,)), SamplingParams(temperature=0.0)
    good, off = torch.zeros(1, VOCAB), torch.zeros(1, VOCAB)
    off[0, 1] = 1.0
    pairs = [torch.cat([first, row[None]]) for row in bad[:3] for first in (good, off)]
    rows = torch.cat([*pairs, bad[:3]])
    jobs = [VerifyJob(tree, greedy, 0, 0, "coupled")] * 6
    jobs += [VerifyJob(None, sampling, 0, 0, "coupled") for sampling in (greedy, SamplingParams(), greedy)]
    verdicts = fused(rows, jobs)
    assert verdicts == truth(rows, jobs)
    assert verdicts[0] == Verdict((0,), (0,), 1, (0,), failed=True)
    assert [v.failed for v in verdicts] == [True, False] * 3 + [True] * 3


def test_greedy_ties_take_the_lowest_id_over_chunks():
    rows = torch.zeros(2, 40)
    rows[1, [17, 18, 39]] = 1.0
    jobs = [VerifyJob(None, SamplingParams(temperature=0.0), 0, 0, "coupled")] * 2
    assert [v.tokens for v in fused(rows, jobs, chunk=16)] == [(0,), (17,)]


def test_logprobs_are_those_of_the_raw_logits():
    """Not of the processed ones, and only where they are wanted."""
    rows, jobs = jobs_of(3, 6, VOCAB, most=5)
    for at_least in (packing.NOTHING, BY_LEVELS):
        result = launched(rows, jobs, at_least, chunk=16)
        first = checked = 0
        for job, verdict, found in zip(jobs, truth(rows, jobs), result.logprobs, strict=True):
            own = rows[first : first + 1 + len(job.tree or ())]
            first += len(own)
            if job.sampling.logprobs is None:
                assert (found.view(torch.int32) == -1).all()
                continue
            exact = [entry.logprob for entry in report(own[list(verdict.rows)], verdict.tokens, 0)]
            assert found[: len(exact)].tolist() == pytest.approx(exact, abs=2e-6)
            checked += len(exact)
        assert checked > 2


def test_a_batch_of_the_same_size_goes_into_the_same_memory():
    """What a captured graph relies on: one copy replaces the batch, and nothing of the last one is left."""
    (first_rows, first), (rows, jobs) = jobs_of(31, 3, VOCAB), jobs_of(32, 3, VOCAB)
    room = packing._size([*first, *jobs], [packing._part(job) for job in (*first, *jobs)], VOCAB, BY_LEVELS)
    batch = VerifyBatch.empty(room)
    workspace = VerifyWorkspace.of(room, chunk=64)
    memory = torch.zeros(room.rows, VOCAB)
    for own, these in ((first_rows, first), (rows, jobs)):
        batch.storage.copy_(packing.pack(these, VOCAB, room).storage)
        memory[: len(own)] = own
        found = packing.verdicts(verification.verify(memory, batch, workspace))[: len(these)]
        assert found == truth(own, these)


def test_the_engine_dispatches_to_kernels_and_leaves_the_logits_alone(monkeypatch):
    """Catches: the torch path taken silently, where kernels were asked for."""
    calls = []
    real = verification.verify
    monkeypatch.setattr(verification, "verify", lambda *args: calls.append(args) or real(*args))
    monkeypatch.setenv("GAMMARAY_KERNELS", "fused")
    rows, jobs = jobs_of(5, 3, VOCAB)
    before = rows.clone()
    assert verifier.verify(rows, jobs) == truth(rows, jobs)
    assert len(calls) == 1 and torch.equal(rows.view(torch.int32), before.view(torch.int32))
    assert verifier.verify(torch.empty(0, VOCAB), []) == []


def test_shapes_that_do_not_fit_are_refused():
    rows, jobs = jobs_of(5, 3, VOCAB)
    batch = packing.pack(jobs, VOCAB)
    workspace = VerifyWorkspace.of(batch.size, chunk=64)
    for wrong in (rows[:-1], rows[:, :-1], rows.T.contiguous().T):
        with pytest.raises(ValueError):
            verification.verify(wrong, batch, workspace)
    with pytest.raises(ValueError, match="do not fit"):
        verification.verify(rows, batch, VerifyWorkspace.of(replace(batch.size, jobs=9), chunk=64))


def test_a_batch_is_scored_by_levels_where_that_reads_less():
    assert not by_levels(jobs=1, rows=9, depth=8)
    assert not by_levels(jobs=32, rows=32, depth=0)
    assert by_levels(jobs=64, rows=64 * 9, depth=8)


def test_trees_between_chain_and_bush_are_tried():
    """So that the random tests above cannot shrink to one shape unseen."""
    shapes = {tuple(parents_of(random.Random(seed), 4)) for seed in range(50)}
    assert {(-1, 0, 1, 2), (-1, -1, -1, -1)} <= shapes and len(shapes) > 8
