"""Processing against a plain reading of its definition, and the draws of a sampling drafter."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gammaray.engine.logits import draw_children, process
from gammaray.kernels.philox import NoiseKeys, Purpose
from gammaray.kernels.verify import draw
from gammaray.types import SamplingParams

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


def table(seed: int, *shape: int, ties: bool = False) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2
    return (values * 2).round() / 2 if ties else values


def kept_by_definition(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """Temperature, min_p, top_k, top_p on one row, with a stable sort and float64."""
    scaled = (logits - logits.max()) / params.temperature
    order = [i for i in np.argsort(-scaled, kind="stable") if np.exp(scaled[i]) >= params.min_p]
    order = order[: params.top_k] if params.top_k else order
    mass = np.exp(scaled[order]) / np.exp(scaled[order]).sum()
    reached = np.cumsum(mass) >= params.top_p - 1e-12
    return set(order[: int(reached.argmax()) + 1] if params.top_p < 1 and reached.any() else order)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), params=PARAMS, ties=st.booleans())
def test_keeps_what_the_definition_keeps(seed, params, ties):
    logits = table(seed, 1, 24, ties=ties)
    result = process(logits, [params])[0]
    if params.greedy:
        assert torch.equal(result, logits[0].log_softmax(-1))
        return
    row = logits[0].double().numpy()
    assert set(result.isfinite().nonzero()[:, 0].tolist()) == kept_by_definition(row, params)
    kept = result.isfinite()
    expected = (logits[0].double() / params.temperature).masked_fill(~kept, -torch.inf).log_softmax(-1)
    assert torch.allclose(result[kept].double(), expected[kept], rtol=1e-5, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), params=st.lists(PARAMS, min_size=2, max_size=6))
def test_rows_do_not_depend_on_batch_mates(seed, params):
    logits = table(seed, len(params), 1500)
    together = process(logits, params)
    alone = torch.cat([process(logits[i : i + 1], [row]) for i, row in enumerate(params)])
    assert torch.equal(together, alone)


def test_the_input_is_left_alone():
    logits = table(0, 2, 16)
    before = logits.clone()
    process(logits, [SamplingParams(top_k=2), SamplingParams(temperature=0.0)])
    assert torch.equal(logits, before)


def kept(logits: list[float], **params: float) -> list[int]:
    return process(torch.tensor([logits]), [SamplingParams(**params)])[0].isfinite().nonzero()[:, 0].tolist()


def test_ties_at_the_cut_keep_the_lowest_ids():
    assert kept([1.0, 2.0, 1.0, 1.0, 2.0], top_k=3) == [0, 1, 4]
    assert kept([1.0] * 8, top_k=3) == [0, 1, 2]
    assert kept([0.0] * 8, top_p=0.45) == [0, 1, 2, 3]


def test_order_of_filters():
    """top_p counts the mass that top_k left, and top_k counts what min_p left."""
    quarter = [float(np.log(x)) for x in (0.4, 0.3, 0.2, 0.1)]
    assert kept(quarter, top_p=0.6) == [0, 1]
    assert kept(quarter, top_k=2, top_p=0.55) == [0]  # 0.4 / 0.7 = 0.57
    assert kept(quarter, min_p=0.6, top_p=0.55) == [0]
    assert kept(quarter, temperature=0.5, min_p=0.3) == [0, 1]  # (0.3 / 0.4)^2 = 0.56, (0.2 / 0.4)^2 = 0.25


@pytest.mark.parametrize("top_p", [0.3, 0.95])
def test_a_flat_distribution_outgrows_the_window(top_p):
    logits = table(3, 1, 4000) * 0.01
    mask = process(logits, [SamplingParams(top_p=top_p)])[0].isfinite()
    assert set(mask.nonzero()[:, 0].tolist()) == kept_by_definition(
        logits[0].double().numpy(), SamplingParams(top_p=top_p)
    )
    assert mask.sum() > 1024


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e38])
@pytest.mark.parametrize("temperature", [1e-5, 1e-38, 1.0])
@pytest.mark.parametrize("extra", [{}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}])
def test_extreme_values_never_give_nan(scale, temperature, extra):
    logits = torch.tensor([[3.0, -3.0, 2.0, -torch.inf]]) * scale
    result = process(logits, [SamplingParams(temperature=temperature, **extra)])
    assert not result.isnan().any()
    assert result.exp().sum().item() == pytest.approx(1.0)
    assert result.argmax().item() == 0


# --- draws of a sampling drafter


def draws(logprobs, n, width, drawn, coupled=False, branch=0, **params):
    """`n` draws at one node, one seed each: tokens [n, w], q [V]."""
    rows = [SamplingParams(seed=seed, **params) for seed in range(n)]
    tokens, ids, probs = draw_children(
        logprobs.expand(n, -1), rows, [0] * n, [5] * n, width, drawn, coupled, [branch] * n
    )
    return tokens, torch.zeros(logprobs.shape[-1]).scatter(0, ids[0], probs[0])


def fits(observed, expected, n):
    expected = np.asarray(expected, dtype=np.float64)
    return stats.chisquare(observed, expected / expected.sum() * n).pvalue > 1e-3


def joint(a, b, vocab):
    return torch.bincount(a * vocab + b, minlength=vocab * vocab).view(vocab, vocab).numpy()


def test_iid_siblings_are_independent_draws_from_the_q_reported():
    tokens, q = draws(table(1, 1, 4).log_softmax(-1), 8000, 2, "iid")
    assert fits(joint(tokens[:, 0], tokens[:, 1], 4).ravel(), np.outer(q, q).ravel(), 8000)


def test_siblings_without_replacement_follow_the_q_that_is_left():
    tokens, q = draws(table(1, 1, 4).log_softmax(-1), 8000, 2, "without_replacement")
    expected = np.outer(q, q) / (1 - q.numpy())[:, None]
    off = ~np.eye(4, dtype=bool)
    assert fits(joint(tokens[:, 0], tokens[:, 1], 4)[off], expected[off], 8000)
    assert (tokens[:, 0] != tokens[:, 1]).all()


@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
def test_branches_draw_independently(drawn):
    logprobs = table(1, 1, 4).log_softmax(-1)
    left, q = draws(logprobs, 8000, 2, drawn)
    right, _ = draws(logprobs, 8000, 2, drawn, branch=1)
    for sibling in range(2 if drawn == "iid" else 1):
        assert fits(joint(left[:, sibling], right[:, 0], 4).ravel(), np.outer(q, q).ravel(), 8000)


def test_q_is_the_top_64_renormalised_and_nothing_else_is_drawn():
    logprobs = (table(2, 1, 200) * 0.2).log_softmax(-1)
    tokens, q = draws(logprobs, 500, 3, "iid")
    top = logprobs[0].topk(64)
    assert torch.allclose(q[top.indices], top.values.softmax(-1))
    assert set(tokens.flatten().tolist()) <= set(top.indices.tolist())


def test_coupled_draws_use_the_targets_noise():
    """With q = p the first child is the target's own token, always."""
    logprobs = table(4, 50, 300).log_softmax(-1).topk(40).values
    rows = [SamplingParams(seed=seed) for seed in range(50)]
    places = [0] * 50, list(range(50))
    target = draw(logprobs, NoiseKeys.build([row.seed for row in rows], *places, Purpose.TARGET))
    for drawn in ("iid", "without_replacement"):
        tokens, _, _ = draw_children(logprobs, rows, *places, 2, drawn, True)
        assert torch.equal(tokens[:, 0], target)
        assert (tokens[:, 1] != target).all()
    alone, _, _ = draw_children(logprobs, rows, *places, 1, "iid", False)
    assert not torch.equal(alone[:, 0], target)


def test_coupled_agreement_is_at_least_the_bound():
    """Daliri et al., arXiv 2408.07978: agreement >= (1 - TV) / (1 + TV)."""
    p, q = table(5, 1, 8).log_softmax(-1), table(6, 1, 8).log_softmax(-1)
    tokens, _ = draws(q, 4000, 1, "iid", coupled=True)
    keys = NoiseKeys.build(range(4000), [0] * 4000, [5] * 4000, Purpose.TARGET)
    agree = (draw(p.expand(4000, -1), keys) == tokens[:, 0]).sum().item()
    tv = 0.5 * (p.exp() - q.exp()).abs().sum().item()
    assert stats.binomtest(agree, 4000, (1 - tv) / (1 + tv), alternative="less").pvalue > 1e-3


def test_greedy_and_deterministic_rows_take_the_top():
    logprobs = table(7, 3, 100).log_softmax(-1)
    greedy, sampled = SamplingParams(temperature=0.0), SamplingParams(seed=3)
    for drawn in ("iid", "without_replacement", "deterministic"):
        params = [sampled if drawn == "deterministic" else greedy] * 3
        for coupled in (True, False):
            tokens, _, _ = draw_children(logprobs, params, [0] * 3, [1, 2, 3], 3, drawn, coupled)
            assert torch.equal(tokens, logprobs.topk(3).indices)


def test_fewer_tokens_than_children():
    logprobs = process(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), [SamplingParams(top_k=2)])
    tokens, ids, probs = draw_children(
        logprobs, [SamplingParams()], [0], [0], 4, "without_replacement", False
    )
    reported = dict(zip(ids[0].tolist(), probs[0].tolist(), strict=True))
    assert [reported[x] > 0 for x in tokens[0].tolist()] == [True, True, False, False]
