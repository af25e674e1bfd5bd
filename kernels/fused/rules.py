"""The rejection rules inside kernels; a program holds one job's p and q on the support of q, [S].

Maths. Child x is tried with a uniform u of its rank among its siblings, and accepted if u q(x) < p(x); else
p <- max(0, p - q) / m and, without replacement, q[x] <- 0. Outside the support p changes by the factor 1 / m
alone, so that, with o the mass outside, no pass over V is needed:

    m = o + sum over the support of max(0, p - q),    o <- o / m,    scale <- scale / m

Cost. A child takes one read, of its token, and four sums over S. Sources: see `kernels/verify.py`, the truth.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gammaray.kernels.fused.philox import seed_of, uniform_at
from gammaray.kernels.philox import Purpose
from gammaray.kernels.verification import Job, Node, Rule
from gammaray.types import MAX_TREE_NODES

TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32, as in `verify.without`

_NODES = tl.constexpr(MAX_TREE_NODES)
_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
_WITHOUT = tl.constexpr(int(Rule.WITHOUT_REPLACEMENT))
_TOKEN = tl.constexpr(int(Node.TOKEN))
_RULE = tl.constexpr(int(Job.RULE))
_SEED_LOW = tl.constexpr(int(Job.SEED_LOW))
_SEED_HIGH = tl.constexpr(int(Job.SEED_HIGH))
_SEQUENCE = tl.constexpr(int(Job.SEQUENCE))
_POSITION = tl.constexpr(int(Job.POSITION))


@triton.jit
def accepts(p_x, q_x, u):
    """u < min(1, p(x) / q(x))"""
    return u * q_x < p_x


@triton.jit
def rejected(p, q, outside, scale):
    """p and its mass outside the support after a rejection, or as they were where rounding leaves no mass."""
    rest = tl.maximum(p - q, 0.0)
    left = outside + tl.sum(rest)
    whole = tl.where(left > 0, left, 1.0)
    return tl.where(left > 0, rest / whole, p), outside / whole, scale / whole


@triton.jit
def without(q, same):
    """q with q[x] = 0, renormalised."""
    rest = tl.where(same, 0.0, q)
    return rest / tl.maximum(tl.sum(rest), TINY)


@triton.jit
def try_children(children, ids, p, q, outside, depth, jobs, J, job, nodes, N, first):
    """The accepted child or 64, and what the rejections left: p on the support, and the scale outside."""
    seed = seed_of(tl.load(jobs + _SEED_LOW * J + job), tl.load(jobs + _SEED_HIGH * J + job))
    position, sequence = tl.load(jobs + _POSITION * J + job) + depth, tl.load(jobs + _SEQUENCE * J + job)
    replaced = tl.load(jobs + _RULE * J + job) == _WITHOUT
    node = tl.arange(0, _NODES)
    child = tl.min(tl.where(children, node, _NODES))
    rank, chosen, scale = child * 0, child * 0 + _NODES, outside * 0.0 + 1.0
    while child < _NODES:
        same = ids == tl.load(nodes + _TOKEN * N + first + 1 + child)
        q_x, p_x = tl.sum(tl.where(same, q, 0.0)), tl.sum(tl.where(same, p, 0.0))
        following = tl.min(tl.where(children & (node > child), node, _NODES))
        if q_x > 0:  # else it cannot have been drawn
            if accepts(p_x, q_x, uniform_at(seed, rank, position, sequence, _ACCEPT)):
                chosen, following = child, child * 0 + _NODES
            else:
                p, outside, scale = rejected(p, q, outside, scale)
                if replaced:
                    q = without(q, same)
        rank += 1
        child = following
    return chosen, p, scale
