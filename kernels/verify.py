"""One step of lossless verification, batched over the nodes that J walks stand on. Plain torch: the truth.

Every rule takes log-probabilities after logits processing. A node's children were *proposed*; the step says
which child is *accepted*, or which token is emitted instead: the *recovered* one when all children were
rejected, the *bonus* when there were none. Two families:

coupled    The token is drawn as plain decoding draws it, and the child that equals it is accepted, whatever
           the draft was. With a drafter that shares the noise they agree with probability at least
           (1-TV)/(1+TV) (Daliri et al., arXiv 2408.07978).
rejection  A child drawn from q is accepted with probability min(1, p/q), else p becomes the residual.
           Chain: Leviathan et al., arXiv 2211.17192, Alg. 1; Chen et al., arXiv 2302.01318.
           I.i.d. siblings: SpecInfer, arXiv 2305.09781 (a chain is the case of one sibling).
           Without replacement: RSD, arXiv 2402.14160; Sequoia, arXiv 2402.12374.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gammaray.kernels.philox import NoiseKeys, gumbel


@dataclass(frozen=True, slots=True)
class SampledChildren:
    """The children of J nodes in the order they were drawn, and what they were drawn from."""

    tokens: Tensor  # [J, W] int64, -1 pads
    q_ids: Tensor  # [J, S] int64
    q_probs: Tensor  # [J, S] float32, rows sum to 1; 0 pads
    without_replacement: Tensor  # [J] bool


def draw(logprobs: Tensor, keys: NoiseKeys) -> Tensor:
    """One token a row, argmax(log p + G): the Gumbel-max draw. [J, V] float32 to [J] int64.

    Plain decoding is this call with noise keyed by (seed, sequence, position), and so is coupled
    verification. Equal sums give the lowest index.
    """
    return (logprobs + gumbel(keys, logprobs.shape[-1])).argmax(-1)


def try_children(logprobs: Tensor, children: SampledChildren, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Rejection rule at J nodes: try the children in the order drawn, each with a uniform of its own.

    logprobs [J, V] and uniforms [J, W], float32. Returns the rank of the accepted child or -1 ([J] int64),
    and the distribution to draw the token from in the second case ([J, V]): p itself where there was no
    child (the bonus is never drawn from a residual), else what the rejections left of it.

    A child with q(x) = 0 cannot have been drawn: it is passed over and leaves p as it is.
    """
    p, q = logprobs.exp(), children.q_probs.clone()
    chosen = torch.full(p.shape[:1], -1, device=p.device)
    for rank in range(children.tokens.shape[1]):
        x = children.tokens[:, rank : rank + 1]  # [J, 1]
        p_x = p.gather(1, x.clamp_min(0))[:, 0]
        q_x = q.masked_fill(children.q_ids != x, 0.0).sum(-1)
        tried = (chosen < 0) & (q_x > 0)
        taken = tried & accepts(p_x, q_x, uniforms[:, rank])
        chosen = torch.where(taken, rank, chosen)
        rejected = (tried & ~taken).nonzero()[:, 0]
        p[rejected] = residual(p[rejected], children.q_ids[rejected], q[rejected])
        spent = rejected[children.without_replacement[rejected]]
        q[spent] = without(q[spent], children.q_ids[spent], x[spent])
    return chosen, p


def accepts(p_x: Tensor, q_x: Tensor, u: Tensor) -> Tensor:
    """u < min(1, p(x)/q(x)), for u in (0, 1) and q(x) > 0."""
    return u * q_x < p_x


def residual(p: Tensor, q_ids: Tensor, q_probs: Tensor) -> Tensor:
    """norm(max(0, p - q)) row by row, or p where rounding leaves no mass. p [R, V], q sparse [R, S]."""
    rest = p.scatter_add(1, q_ids, -q_probs).clamp_min_(0.0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def without(q_probs: Tensor, q_ids: Tensor, x: Tensor) -> Tensor:
    """q with q[x] = 0, renormalised (all zero when x had all the mass). q [R, S], x [R, 1]."""
    rest = q_probs.masked_fill(q_ids == x, 0.0)
    return rest / rest.sum(-1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny)
