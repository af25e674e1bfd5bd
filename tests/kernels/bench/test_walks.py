"""The truth of drafted trees: by hand, and how much of it rounding leaves to compare."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from gammaray.kernels.bench import drafts, verification
from gammaray.kernels.bench.case import SEED
from gammaray.kernels.bench.drafts import Kind, draft
from gammaray.kernels.bench.walks import Drafted, Limits, Sampling, constrained, filtered, step, walk
from gammaray.kernels.philox import NoiseKeys, Purpose, gumbel
from gammaray.kernels.verification import Rule, VerifyResult

CPU = torch.device("cpu")
LOGS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()


def kept(sampling: Sampling, x: torch.Tensor = LOGS) -> list[int]:
    return (filtered(x, sampling)[0] > -math.inf).nonzero()[:, 0].tolist()


def test_filters_by_hand() -> None:
    """In order: min_p, then top_k, then top_p of what those left; ties by id."""
    assert kept(Sampling(top_k=2)) == [1, 3]
    assert kept(Sampling(top_p=0.65)) == [1, 3]
    assert kept(Sampling(top_p=0.75)) == [1, 2, 3]
    assert kept(Sampling(min_p=0.45)) == [1, 2, 3]
    assert kept(Sampling(top_k=2, top_p=0.5)) == [1], "0.4 is 57 % of what top_k left"
    assert kept(Sampling(top_k=3), torch.zeros(5)) == [0, 1, 2]
    assert kept(Sampling(temperature=0.5, top_p=0.8)) == [1, 3], "of the squares, normalised"


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.7), Sampling(min_p=0.75)])
def test_a_cut_at_a_tie_is_not_decided(sampling: Sampling) -> None:
    assert not filtered(LOGS, sampling)[1]
    assert filtered(LOGS, replace(sampling, top_p=sampling.top_p * 0.99, min_p=sampling.min_p * 0.99))[1]


def job(rule: Rule, limits: Limits | None = None) -> Drafted:
    """Token 1 twice, one below the other."""
    q = torch.tensor([[1], [1]]), torch.ones(2, 1)
    return Drafted(
        rule, (-1, 0), (1, 1), *q, seed=3, sequence=0, position=5, sampling=Sampling(), limits=limits
    )


def test_constraints_by_hand() -> None:
    """Mask, bans, bias, then penalties, that count the path; the last token is held back, others are left."""
    limits = Limits(
        repetition=2.0,
        frequency=0.25,
        presence=0.5,
        bias=torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
        prompt=torch.tensor([True, False, False, False, False, False]),
        counts=torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
        bans=((), (), (3, ~5)),
        masks=(None, None, torch.tensor([True, True, True, True, False, True])),
    )
    x = torch.tensor([-1.0, 3.0, 1.0, 9.0, 9.0, 9.0])
    inf = math.inf
    assert constrained(job(Rule.GREEDY, limits), x, 2).tolist() == [-2.0, 0.75, 1.0, -inf, -inf, -inf]
    few = replace(limits, masks=(None, None, torch.arange(6) == 5))
    assert constrained(job(Rule.GREEDY, few), x, 2).tolist() == [-inf] * 5 + [9.0], "nothing else is left"


def test_equal_scores_are_left_to_rounding_unless_they_are_numbers_as_given() -> None:
    flat = torch.zeros(3, 4)
    assert walk(job(Rule.GREEDY), flat).tokens == [0], "the lowest id, and token 1 was drafted"
    coupled = job(Rule.COUPLED)
    noise = step(coupled, flat, 0)
    assert noise.decided
    even = -gumbel(NoiseKeys.build([3], [0], [5], Purpose.TARGET), 4)
    assert not step(coupled, even.expand(3, 4), 0).decided
    assert walk(coupled, even.expand(3, 4)).whole is False


@pytest.mark.parametrize("vocab", [40, 5000])
def test_nearly_all_steps_are_compared_and_walks_go_down(vocab: int) -> None:
    """Catches: a tolerance so wide that a check compares nothing, drafts that nobody accepts."""
    torch.manual_seed(0)
    kind = Kind(True, True, vocab, False)
    walks = [walk(*draft(kind, *one, CPU)) for _ in range(4) for one in drafts._each(kind)]
    assert sum(one.whole for one in walks) >= 0.9 * len(walks)
    assert sum(len(one.path) for one in walks) >= 0.6 * len(walks)
    assert max(len(one.path) for one in walks) >= 2


@pytest.mark.parametrize(("rule", "filters"), [("greedy", False), ("coupled", True), ("rejection", True)])
def test_a_chain_is_compared_up_to_its_first_near_tie(rule: str, filters: bool) -> None:
    torch.manual_seed(0)
    shape = verification.Shape(rule, 4, 3, filters, vocab=5000)
    logits = torch.randn(shape.rows, 5000).mul(4).bfloat16()
    truth = verification.Truth(shape, logits)
    assert truth.decided.float().mean() >= 0.9
    wrong = VerifyResult.of(torch.full((4, 4 * 3 + 5), -7, dtype=torch.int32), 3)
    assert truth.share_wrong(wrong) == 1.0
    truth.decided.view(4, -1)[1, 0] = False
    assert truth.share_wrong(wrong) == 0.75


def without(what: str, job: Drafted) -> Drafted:
    """The job with one thing left out."""
    rows = len(job.tokens) + 1
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "frequency": 0.0, "presence": 0.0}
    off |= {"bans": ((),) * rows, "masks": (None,) * rows}
    if hasattr(job.sampling, what):
        return replace(job, sampling=replace(job.sampling, **{what: off[what]}))
    if job.limits is None:
        return job
    old = getattr(job.limits, what)
    new = off[what] if what in off else torch.zeros_like(old)
    return replace(job, limits=replace(job.limits, **{what: new}))


def test_the_check_would_notice_whatever_a_kernel_left_out() -> None:
    """Even on a CPU, where few jobs are checked: filters so wide that nothing else is drawn prove nothing."""
    jobs = []
    for kind in drafts.kinds(CPU):
        torch.manual_seed(SEED)
        jobs += [draft(kind, *one, CPU) for one in drafts._each(kind)]
    filters, limits = {"top_k", "top_p", "min_p"}, {field.name for field in fields(Limits)}
    unnoticed = filters | limits
    for what in filters | limits:
        if any(walk(without(what, job), logits) != walk(job, logits) for job, logits in jobs):
            unnoticed.remove(what)
    assert unnoticed == set()
