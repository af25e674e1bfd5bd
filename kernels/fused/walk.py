"""Follows each job's tree with what `score` found: the rules of `kernels/verify.py`, one program a job.

Maths. Greedy and coupled: x* is the best score of the row's chunks; the first child equal to it is accepted,
else x* is emitted. Rejection: see `rules.py`, which needs p on the support of q and o, the mass outside. o is
1 minus the mass of the support, and exactly 0 where the count of tokens kept says that nothing lies outside.

Cost. 12 bytes a chunk of each visited row, 16 S bytes where children are tested: latency, not bandwidth. A
step is about three dependent reads, 2 us.

Layout. residual [J, S] float32: log of what the rejections left of p, inf where q was 0 (`emit` takes these
tokens from the row). emission [5, J] int32: slot (-1: nothing to emit), row, row of q, and the bits of the
row's maximum and of log(scale / mass). result: see `VerifyResult`.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from gammaray.kernels.fused.logits import INF, distance, kept, number, row_logits, signature
from gammaray.kernels.fused.rules import TINY, try_children
from gammaray.kernels.fused.score import BEST, KEPT, MASS, RAW_MASS, RAW_TOP, SHIFT, TOKEN
from gammaray.kernels.fused.variant import Variant
from gammaray.kernels.verification import CHUNK, Job, Node, Rule, VerifyBatch, VerifyWorkspace
from gammaray.types import MAX_TREE_NODES

WARPS = 1

_NODES = tl.constexpr(MAX_TREE_NODES)
_IID = tl.constexpr(int(Rule.IID))
_NODE_TOKEN = tl.constexpr(int(Node.TOKEN))
_PARENT = tl.constexpr(int(Node.PARENT))
_FIRST_ROW = tl.constexpr(int(Job.FIRST_ROW))
_ROWS = tl.constexpr(int(Job.ROWS))
_RULE = tl.constexpr(int(Job.RULE))
_TEMPERATURE = tl.constexpr(int(Job.TEMPERATURE))
_FILTERED = tl.constexpr(int(Job.FILTERED))
_LOGPROBS = tl.constexpr(int(Job.LOGPROBS))
_CONSTRAINED = tl.constexpr(int(Job.CONSTRAINED))


@triton.jit
def best_of(chunk, inside, offsets):
    """The token of the best score among a row's chunks; of equal scores the lowest."""
    best, token = chunk
    score = tl.load(best, mask=inside, other=-INF) - offsets
    at = tl.argmax(tl.where(score == score, score, -INF), axis=0)
    tokens = tl.load(token, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    return tl.sum(tl.where(tl.arange(0, tokens.shape[0]) == at, tokens, 0))


@triton.jit
def raw_logprob(raw, token, chunk, plane, inside):
    """log softmax of a row's raw logits at one token; `chunk` [CHUNKS] points to the row's partials."""
    tops = tl.load(chunk + RAW_TOP * plane, mask=inside, other=-INF)
    masses = tl.load(chunk + RAW_MASS * plane, mask=inside, other=0.0)
    top = tl.max(tops)
    mass = tl.sum(tl.where(masses > 0, masses * tl.exp(tops - top), 0.0))
    return tl.load(raw + token).to(tl.float32) - top - tl.log(mass)


@triton.jit
def _children(nodes, N, first, count, here):
    """Which nodes [64] of a job are children of row `here`, counted from its first."""
    node = tl.arange(0, _NODES)
    inside = node < count - 1
    return inside & (tl.load(nodes + _PARENT * N + first + 1 + node, mask=inside, other=-1) == here)


@triton.jit
def _on_support(ids, raw, edited, jobs, J, job, cuts, slots, slot, top, mass):
    """p [SUPPORT] of the tokens ids, 0 for -1, and how many of them filters kept."""
    x = row_logits(raw, edited, tl.load(jobs + _CONSTRAINED * J + job), ids, ids >= 0)
    a = distance(x, top, number(jobs + _TEMPERATURE * J + job))
    if tl.load(jobs + _FILTERED * J + job):
        a = tl.where(kept(a, ids, tl.load(cuts + slot), tl.load(cuts + slots + slot)), a, INF)
    found = (ids >= 0) & (a < INF)
    return tl.where(found, tl.exp(-a) / mass, 0.0), tl.sum(found.to(tl.float32))


@triton.jit
def _reject(
    children, first, depth, row, slot, raw, edited, chunk, offsets, top, jobs, J, job, nodes, N,
    q_ids, q_probs, S, cuts, slots, plane, chunks, residual, emission, SUPPORT: tl.constexpr,
):  # fmt: skip
    """The child that the rejection rules accept at a row, or 64; then what is left goes to `emit`."""
    inside = tl.arange(0, offsets.shape[0]) < chunks
    masses = tl.load(chunk + MASS * plane, mask=inside, other=0.0)
    mass = tl.sum(tl.where(masses > 0, masses * tl.exp(-offsets), 0.0))
    every = tl.sum(tl.load(chunk + KEPT * plane, mask=inside, other=0.0))
    eldest = tl.min(tl.where(children, tl.arange(0, _NODES), _NODES))
    q_row, lane = first + 1 + eldest, tl.arange(0, SUPPORT)
    q = tl.load(q_probs + q_row * S + lane, mask=lane < tl.where(eldest < _NODES, S, 0), other=0.0)
    ids = tl.load(q_ids + q_row * S + lane, mask=q > 0, other=-1)
    p, found = _on_support(ids, raw, edited, jobs, J, job, cuts, slots, slot, top, mass)
    # Exactly 0 where nothing lies outside, else what rounding makes of it.
    outside = tl.where(every > found, tl.maximum(1.0 - tl.sum(p), 0.0), 0.0)
    chosen, left, scale = try_children(children, ids, p, q, outside, depth, jobs, J, job, nodes, N, first)
    if chosen == _NODES:
        value = tl.where(left > 0, tl.log(tl.maximum(left, TINY)), -INF)
        tl.store(residual + job * S + lane, tl.where(ids >= 0, value, INF), mask=lane < S)
        tl.store(emission + job, slot)
        tl.store(emission + J + job, row)
        tl.store(emission + 2 * J + job, q_row)
        tl.store(emission + 3 * J + job, top.to(tl.int32, bitcast=True))
        tl.store(emission + 4 * J + job, tl.log(scale / mass).to(tl.int32, bitcast=True))
    return chosen


@triton.jit(do_not_specialize=["J", "N", "slots", "plane", "width", "depth"])
def _walk(
    logits, stride, scratch, rows, next_rows, jobs, J, nodes, N, q_ids, q_probs, S, cuts, slots, partials,
    plane, chunks, residual, emission, result, width, depth, vocab, CHUNKS: tl.constexpr,
    SUPPORT: tl.constexpr, FIRST: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    job = tl.program_id(0)
    first, count = tl.load(jobs + _FIRST_ROW * J + job), tl.load(jobs + _ROWS * J + job)
    rule = tl.load(jobs + _RULE * J + job)
    path = result + job * width
    tokens, counts = path + 2 * depth, path + 4 * depth + 2
    if FIRST:
        here, accepted, tested = job * 0, job * 0, job * 0
        alive = (first >= 0) & (count > 0)
        words = tl.arange(0, _NODES)
        for start in range(0, width, _NODES):
            tl.store(path + start + words, words * 0 - 1, mask=start + words < width)
        tl.debug_barrier()
        tl.store(counts, 0)
        tl.store(counts + 1, 0)
        tl.store(counts + 2, 0)
        tl.store(emission + job, -1)
    else:
        row = tl.load(rows + job)
        here, alive = row - first, row >= 0
        accepted, tested = tl.load(counts), tl.load(counts + 1)
    at = tl.arange(0, CHUNKS)
    inside = at < chunks
    go = alive
    while go:
        row = first + here
        slot = job if LEVELS else row
        raw, edited = logits + row.to(tl.int64) * stride, scratch + slot.to(tl.int64) * vocab
        chunk = partials + slot * chunks + at
        shifts = tl.load(chunk + SHIFT * plane, mask=inside, other=-INF)
        top = tl.max(tl.where(shifts == shifts, shifts, INF))  # a NaN counts as infinite
        alive = (top > -INF) & (top < INF)
        if alive:
            temperature = number(jobs + _TEMPERATURE * J + job)
            offsets = tl.where(shifts > -INF, (top - shifts) / temperature, INF)
            children = _children(nodes, N, first, count, here)
            node = tl.arange(0, _NODES)
            chosen = tl.min(tl.where(children, node, _NODES))  # the first child, while none is chosen
            tested += (chosen < _NODES).to(tl.int32)
            token = job * 0 - 1
            if SUPPORT > 0 and rule >= _IID:
                chosen = _reject(
                    children, first, accepted, row, slot, raw, edited, chunk, offsets, top, jobs, J, job,
                    nodes, N, q_ids, q_probs, S, cuts, slots, plane, chunks, residual, emission, SUPPORT,
                )  # fmt: skip
                if chosen < _NODES:
                    token = tl.load(nodes + _NODE_TOKEN * N + first + 1 + chosen)
            else:
                token = best_of((chunk + BEST * plane, chunk + TOKEN * plane), inside, offsets)
                mine = tl.load(nodes + _NODE_TOKEN * N + first + 1 + node, mask=children, other=-1)
                chosen = tl.min(tl.where(children & (mine == token), node, _NODES))
            alive = chosen < _NODES
            if token >= 0:
                tl.store(tokens + accepted, token)
                if tl.load(jobs + _LOGPROBS * J + job):
                    value = raw_logprob(raw, token, chunk, plane, inside)
                    tl.store(tokens + depth + 1 + accepted, value.to(tl.int32, bitcast=True))
            if alive:
                tl.store(path + accepted, chosen)
                rank_of = tl.sum((children & (node < chosen)).to(tl.int32))
                tl.store(path + depth + accepted, rank_of)
                here = chosen + 1
                accepted += 1
        else:
            tl.store(counts + 2, 1)
        go = alive & (not LEVELS)
    tl.store(counts, accepted)
    tl.store(counts + 1, tested)
    if LEVELS:
        tl.store(next_rows + job, tl.where(alive, first + here, -1))


def walk(logits: Tensor, rows: Tensor, batch: VerifyBatch, workspace: VerifyWorkspace, first: bool) -> None:
    """Follow the trees as far as rows were scored; writes `workspace.result`, `residual` and `emission`.

    By levels it is one step, from `rows` [J], and writes the rows to score next to `workspace.rows`.
    """
    size, chunks = batch.size, workspace.partials.shape[2]
    _walk[(size.jobs,)](
        logits,
        logits.stride(0),
        workspace.scratch,
        rows,
        workspace.rows,
        batch.jobs,
        size.jobs,
        batch.nodes,
        size.rows,
        batch.q_ids,
        batch.q_probs,
        size.support,
        workspace.cuts,
        size.slots,
        workspace.partials,
        workspace.partials.stride(0),
        chunks,
        workspace.residual,
        workspace.emission,
        workspace.result,
        size.width,
        size.depth,
        size.vocab,
        CHUNKS=triton.next_power_of_2(chunks),
        SUPPORT=triton.next_power_of_2(size.support) if size.support else 0,
        FIRST=first,
        LEVELS=size.levels,
        num_warps=WARPS,
    )


def variants() -> Iterator[Variant]:
    """Ways to compile `walk`, see `Variant`."""
    chunks = triton.next_power_of_2(-(-128256 // CHUNK))
    for dtype in ("bf16", "fp32"):
        for support in (0, 64):
            for first, levels in ((True, False), (True, True), (False, True)):
                constants = {"CHUNKS": chunks, "SUPPORT": support, "FIRST": first, "LEVELS": levels}
                name = f"walk {dtype} support {support} {'by levels' if levels else 'at once'}"
                name += "" if first else ", next"
                yield Variant(name, _walk, signature(_walk, dtype, constants), constants, WARPS)
