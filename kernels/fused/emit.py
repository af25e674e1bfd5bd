"""The token that a job of the rejection rules emits: recovered from the residual, or the bonus from p.

Maths. argmax over V of log r + G with noise of the purpose RESIDUAL. Outside the support of q, log r = -a +
log(scale / mass); on it r is what `walk` left. Nothing is renormalised: argmax does not need it.

Cost. One row of V logits a job, about 75 operations a token, and S comparisons a chunk.

Layout. Best scores and their tokens go into the partials of the row's slot (`score.py`), which are free then.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from gammaray.kernels.fused.logits import INF, distance, kept, number, row_logits, signature
from gammaray.kernels.fused.score import BEST, TOKEN, noise
from gammaray.kernels.fused.variant import Variant
from gammaray.kernels.fused.walk import best_of, raw_logprob
from gammaray.kernels.philox import Purpose
from gammaray.kernels.verification import CHUNK, Job, Node, VerifyBatch, VerifyWorkspace

WARPS = 8

_RESIDUAL = tl.constexpr(int(Purpose.RESIDUAL))
_DEPTH = tl.constexpr(int(Node.DEPTH))
_TEMPERATURE = tl.constexpr(int(Job.TEMPERATURE))
_FILTERED = tl.constexpr(int(Job.FILTERED))
_LOGPROBS = tl.constexpr(int(Job.LOGPROBS))
_CONSTRAINED = tl.constexpr(int(Job.CONSTRAINED))


@triton.jit
def unseen(a, offset, tokens):
    """log r of tokens outside the support of q, where rejections have only scaled p; all, at a leaf."""
    return offset - a


@triton.jit(do_not_specialize=["J", "N", "slots", "plane"])
def _emit(
    logits, stride, scratch, jobs, J, nodes, N, q_ids, S, cuts, slots, partials, plane, chunks, residual,
    emission, vocab, CHUNK: tl.constexpr,
):  # fmt: skip
    job, chunk = tl.program_id(0), tl.program_id(1)
    slot, row = tl.load(emission + job), tl.load(emission + J + job)
    if slot < 0:
        return
    top, offset = number(emission + 3 * J + job), number(emission + 4 * J + job)
    raw, edited = logits + row.to(tl.int64) * stride, scratch + slot.to(tl.int64) * vocab
    first = chunk * CHUNK
    tokens = first + tl.arange(0, CHUNK)
    x = row_logits(raw, edited, tl.load(jobs + _CONSTRAINED * J + job), tokens, tokens < vocab)
    a = distance(x, top, number(jobs + _TEMPERATURE * J + job))
    if tl.load(jobs + _FILTERED * J + job):
        a = tl.where(kept(a, tokens, tl.load(cuts + slot), tl.load(cuts + slots + slot)), a, INF)
    left = unseen(a, offset, tokens)
    q_row = tl.load(emission + 2 * J + job)
    for i in range(S):
        value = tl.load(residual + job * S + i)
        if value < INF:
            x_i = tl.load(q_ids + q_row * S + i)
            if (x_i >= first) & (x_i < first + CHUNK):
                left = tl.where(tokens == x_i, value, left)
    depth = tl.load(nodes + _DEPTH * N + row)
    score = left + noise(jobs, J, job, depth, first, _RESIDUAL, CHUNK)
    best, at = tl.max(tl.where(score == score, score, -INF), axis=0, return_indices=True)
    out = partials + slot * chunks + chunk
    tl.store(out + BEST * plane, best)
    tl.store(out + TOKEN * plane, (first + at).to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["J", "plane", "width", "depth"])
def _settle(
    logits, stride, jobs, J, partials, plane, chunks, emission, result, width, depth, CHUNKS: tl.constexpr,
):  # fmt: skip
    job = tl.program_id(0)
    slot, row = tl.load(emission + job), tl.load(emission + J + job)
    if slot < 0:
        return
    at = tl.arange(0, CHUNKS)
    chunk = partials + slot * chunks + at
    inside = at < chunks
    token = best_of((chunk + BEST * plane, chunk + TOKEN * plane), inside, 0.0)
    accepted = tl.load(result + job * width + 4 * depth + 2)
    tokens = result + job * width + 2 * depth
    tl.store(tokens + accepted, token)
    if tl.load(jobs + _LOGPROBS * J + job):
        raw = logits + row.to(tl.int64) * stride
        value = raw_logprob(raw, token, chunk, plane, inside)
        tl.store(tokens + depth + 1 + accepted, value.to(tl.int32, bitcast=True))


def emit(logits: Tensor, batch: VerifyBatch, workspace: VerifyWorkspace) -> None:
    """Draw the last token of each job that `walk` left without, into `workspace.result`."""
    size, chunks = batch.size, workspace.partials.shape[2]
    partials, plane = workspace.partials, workspace.partials.stride(0)
    _emit[(size.jobs, chunks)](
        logits,
        logits.stride(0),
        workspace.scratch,
        batch.jobs,
        size.jobs,
        batch.nodes,
        size.rows,
        batch.q_ids,
        size.support,
        workspace.cuts,
        size.slots,
        partials,
        plane,
        chunks,
        workspace.residual,
        workspace.emission,
        size.vocab,
        CHUNK=workspace.chunk,
        num_warps=WARPS,
    )
    _settle[(size.jobs,)](
        logits,
        logits.stride(0),
        batch.jobs,
        size.jobs,
        partials,
        plane,
        chunks,
        workspace.emission,
        workspace.result,
        size.width,
        size.depth,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=1,
    )


def variants() -> Iterator[Variant]:
    """Ways to compile `emit`, see `Variant`."""
    chunks = triton.next_power_of_2(-(-128256 // CHUNK))
    for dtype in ("bf16", "fp32"):
        yield Variant(f"emit {dtype}", _emit, signature(_emit, dtype, ["CHUNK"]), {"CHUNK": CHUNK}, WARPS)
        yield Variant(
            f"emit {dtype}, settle", _settle, signature(_settle, dtype, ["CHUNKS"]), {"CHUNKS": chunks}, 1
        )
