"""Which tokens min_p, top_k and top_p keep, against the engine's `process`, which sorts.

Catches: a cut at the wrong one of several equal tokens, a bound from the sample that is too tight, a search
that stops one key too early, candidates lost when they do not fit, mass counted before top_k, not after.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gammaray.engine import packing
from gammaray.engine.logits import process
from gammaray.engine.verifier import VerifyJob
from gammaray.kernels.fused import thresholds
from gammaray.kernels.verification import Job, VerifyWorkspace
from gammaray.types import SamplingParams

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-5, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 50]),
    top_p=st.sampled_from([1.0, 0.97, 0.9, 0.45, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


def kept(logits: torch.Tensor, params: list[SamplingParams], chunk: int) -> torch.Tensor:
    """[R, V] bool, by the kernel: what is left of each row."""
    batch = packing.pack([VerifyJob(None, row, 0, 0, "coupled") for row in params], logits.shape[1])
    workspace = VerifyWorkspace.of(batch.size, chunk=chunk)
    workspace.found.fill_(1)  # the key of a very near token, were it read
    everything = torch.full((3, len(params)), 0x7FFFFFFF, dtype=torch.int32)
    workspace.cuts.copy_(everything)
    if batch.size.filters:
        thresholds.cut(logits, workspace.rows, batch, workspace)
    cuts, ties, _ = workspace.cuts[:, :, None]
    temperature = batch.jobs[Job.TEMPERATURE].view(torch.float32)[:, None]
    distance = (logits.float().amax(-1, keepdim=True) - logits.float()) / temperature
    keys = distance.abs().view(torch.int32)
    return ((keys < cuts) | ((keys == cuts) & (torch.arange(logits.shape[1]) <= ties))) & distance.isfinite()


def same(logits: torch.Tensor, params: list[SamplingParams], chunk: int = 64) -> None:
    """The sets are equal; or else the share of mass at the cut is top_p to 1e-6, which rounding decides."""
    found, expected = kept(logits, params, chunk), process(logits.float(), params).isfinite()
    for row, own, mine, right in zip(logits.float(), params, found, expected, strict=True):
        if torch.equal(mine, right):
            continue
        without_p = process(row[None], [SamplingParams(own.temperature, own.top_k, 1.0, own.min_p)])
        share = without_p[0].double().exp()[mine & right].sum()
        assert abs(float(share) - own.top_p) < 1e-6, (own, mine.nonzero().tolist(), right.nonzero().tolist())


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 2, 5, 24, 100]),
    params=st.lists(PARAMS, min_size=3, max_size=3),
    ties=st.booleans(),
    chunk=st.sampled_from([16, 128]),
)
def test_keeps_what_sorting_keeps(seed, vocab, params, ties, chunk):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab, generator=generator) * 2
    logits = (logits * 2).round() / 2 if ties else logits
    logits[1, : vocab // 2] = -torch.inf
    same(logits, params, chunk)


@pytest.mark.parametrize("top", [{"top_k": 3}, {"top_p": 0.45}, {"top_k": 7, "top_p": 0.45}, {"min_p": 1.0}])
def test_equal_tokens_are_kept_lowest_id_first(top):
    logits = torch.zeros(3, 10)
    logits[1] = torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    logits[2, 5:] = -torch.inf
    same(logits, [SamplingParams(**top)] * 3, chunk=4)


@pytest.mark.parametrize("top", [{"top_k": 1}, {"top_p": 0.45}, {"top_k": 2, "top_p": 0.7}])
def test_zeros_of_both_signs_are_equal(top):
    """0 - -0 and -0 - 0 differ in their bits, which are what is searched."""
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.5], [-1.0, 0.0, -0.0, -0.5]])
    same(logits, [SamplingParams(temperature=1e-5, **top)] * 2)


def test_all_but_one():
    """Catches: a filter that is taken for none at the edge."""
    same(torch.arange(9.0)[None], [SamplingParams(seed=1, top_k=8)])


def test_as_many_as_there_are_and_more():
    """top_k >= V keeps all, and what is -inf stays out."""
    logits = torch.tensor([[1.0, -torch.inf, 0.5, 2.0]]).expand(3, -1).contiguous()
    params = [SamplingParams(top_k=k, top_p=p) for k, p in ((4, 0.9), (1000, 1.0), (3, 0.999999))]
    same(logits, params)
    assert kept(logits, params, 64).sum(-1).tolist() == [3, 3, 3]


@pytest.mark.parametrize("top", [{"top_p": 0.95}, {"top_k": 300}, {"top_k": 400, "top_p": 0.9}])
def test_a_flat_row_has_more_candidates_than_there_is_room_for(top):
    """chunk 16 has room for 64: the search must go back to the row."""
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1)) * 0.01
    same(logits, [SamplingParams(**top)], chunk=16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_16_bits_have_ties(dtype):
    logits = (torch.randn(2, 300, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    same(logits, [SamplingParams(top_k=20), SamplingParams(top_p=0.83)], chunk=256)


def test_a_realistic_row():
    """V = 32000 in blocks of the size that a GPU uses."""
    logits = torch.randn(2, 32000, generator=torch.Generator().manual_seed(3)) * 2.5
    params = [SamplingParams(top_k=50, top_p=0.9), SamplingParams(top_p=0.95, temperature=0.7)]
    same(logits, params, chunk=4096)
