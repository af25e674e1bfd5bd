"""The rules one node at a time, with uniforms chosen by hand. Distributions are tested with the engine."""

import pytest
import torch

from gammaray.kernels.philox import NoiseKeys, Purpose, gumbel
from gammaray.kernels.verify import SampledChildren, accepts, draw, residual, try_children, without

P = [0.5, 0.3, 0.2, 0.0]
Q = [0.1, 0.6, 0.2, 0.1]


def node(tokens, q=Q, without_replacement=False, p=P, uniforms=None):
    children = SampledChildren(
        torch.tensor([tokens]),
        torch.arange(len(q))[None],
        torch.tensor([q]),
        torch.tensor([without_replacement]),
    )
    u = torch.tensor([uniforms if uniforms is not None else [0.999] * len(tokens)])
    chosen, left = try_children(torch.tensor([p]).log(), children, u)
    return chosen.item(), left[0].tolist()


@pytest.mark.parametrize(("token", "u", "accepted"), [(0, 0.999, True), (1, 0.49, True), (1, 0.51, False)])
def test_accepts_with_min_1_p_over_q(token, u, accepted):
    assert node([token], uniforms=[u])[0] == (0 if accepted else -1)
    assert bool(accepts(*(torch.tensor(x) for x in (P[token], Q[token], u)))) is accepted


def test_a_rejection_leaves_the_residual():
    assert node([1]) == (-1, pytest.approx([1.0, 0.0, 0.0, 0.0]))
    assert node([3], q=[0.3, 0.2, 0.2, 0.3])[1] == pytest.approx([2 / 3, 1 / 3, 0.0, 0.0])


def test_a_leaf_draws_its_bonus_from_p():
    assert node([-1]) == (-1, pytest.approx(P))
    assert node([-1, -1], q=[]) == (-1, pytest.approx(P))


def test_iid_siblings_meet_the_same_q_again():
    """p -> (2/3, 1/3, 0, 0) after the first rejection, and q is as it was."""
    q = [0.3, 0.2, 0.2, 0.3]
    chosen, left = node([3, 3], q=q)
    after = [2 / 3 - 0.3, 1 / 3 - 0.2, 0.0, 0.0]
    assert chosen == -1 and left == pytest.approx([x / sum(after) for x in after])
    assert node([3, 1], q=q, uniforms=[0.9, 0.999])[0] == 1


def test_siblings_without_replacement_meet_q_without_their_elders():
    q = [0.3, 0.2, 0.2, 0.3]
    after = [2 / 3 - 0.3 / 0.7, 1 / 3 - 0.2 / 0.7, 0.0, 0.0]
    assert node([3, 2], q=q, without_replacement=True)[1] == pytest.approx([x / sum(after) for x in after])
    assert node([3, 3], q=q, without_replacement=True)[1] == pytest.approx([2 / 3, 1 / 3, 0.0, 0.0])


def test_later_siblings_have_their_own_uniform_and_no_say_after_an_acceptance():
    assert node([1, 0], uniforms=[0.6, 0.9])[0] == 1
    assert node([1, 0], uniforms=[0.4, 0.9])[0] == 0
    assert node([0, 1], uniforms=[0.9, 0.999]) == (0, pytest.approx(P))


def test_a_child_that_q_cannot_draw_is_passed_over():
    assert node([0, 1], q=[0.0, 1.0, 0.0, 0.0], uniforms=[0.001, 0.2])[0] == 1
    assert node([0], q=[0.0, 1.0, 0.0, 0.0], uniforms=[0.001]) == (-1, pytest.approx(P))


def test_a_residual_without_mass_is_p_itself():
    p = torch.tensor([P])
    assert torch.equal(residual(p, torch.arange(4)[None], p), p)
    q = torch.tensor([[1.0, 0.0]])
    assert without(q, torch.tensor([[2, 0]]), torch.tensor([[2]])).tolist() == [[0.0, 0.0]]


def test_sparse_q_may_be_padded_with_any_id():
    p = torch.tensor([P])
    padded = residual(p, torch.tensor([[1, 3, 0, 0]]), torch.tensor([[0.6, 0.4, 0.0, 0.0]]))
    assert padded[0].tolist() == pytest.approx([5 / 7, 0.0, 2 / 7, 0.0])


def test_nodes_do_not_touch_each_other():
    """The walk's batch is an implementation detail: any node gives the same alone."""
    cases = [([1, 3], Q, False), ([-1, -1], Q, False), ([1, 2], Q, True), ([0, 1], Q, True)]
    children = SampledChildren(
        torch.tensor([tokens for tokens, _, _ in cases]),
        torch.arange(4).repeat(4, 1),
        torch.tensor([q for _, q, _ in cases]),
        torch.tensor([replaced for _, _, replaced in cases]),
    )
    chosen, left = try_children(torch.tensor([P] * 4).log(), children, torch.full((4, 2), 0.999))
    assert list(zip(chosen.tolist(), left.tolist(), strict=True)) == [node(*case) for case in cases]


def test_draw_is_gumbel_max_and_takes_the_lowest_index_on_ties():
    keys = NoiseKeys.build([7], [0], [3], Purpose.TARGET)
    scores = torch.zeros(1, 8).log_softmax(-1)
    assert draw(scores, keys).item() == gumbel(keys, 8).argmax().item()
    noise = gumbel(keys, 8)
    assert draw(torch.where(noise < 0, -torch.inf, 1.0 - noise), keys).item() == int(
        (noise[0] >= 0).nonzero()[0]
    )
