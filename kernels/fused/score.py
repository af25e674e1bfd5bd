"""One read of the logits: what each chunk of a row contributes to its walk.

Maths. With a = (shift - x) / T, a chunk gives its mass, the sum of exp(-a), and its best noisy score, the
maximum of G - a (Gumbel-max; Maddison et al., arXiv 1411.0030). `walk` corrects for shifts that differ. The
shift is the chunk's own maximum, so that no exponential overflows, or the row's where filters need it.

Cost. V logits of 2 or 4 bytes are read once a scored row, and 28 bytes written a chunk: the floor is reading
the logits. Greedy rows cost a comparison a token and reach it; the noise of coupled rows costs about 70
operations a token, so that one SM makes about 3 tokens a clock: at V = 128k about 0.3 us a row on an H200,
against 0.06 us for reading it in bfloat16. Scoring only the rows that walks stand on pays for that.

Layout. partials [7, slots, chunks] float32: shift (NaN when the chunk has a NaN), mass, best score, its token
(the bits of an int32), tokens kept, and maximum and mass of the raw logits. Mass and tokens kept are written
for the rejection rules, raw ones where log-probabilities are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from gammaray.kernels.fused.logits import INF, distance, job_of, kept, number, row_logits, signature
from gammaray.kernels.fused.philox import gumbel_tile, seed_of
from gammaray.kernels.fused.variant import Variant
from gammaray.kernels.philox import Purpose
from gammaray.kernels.verification import CHUNK, Job, Node, Rule, VerifyBatch, VerifyWorkspace

WARPS = 8

SHIFT = tl.constexpr(0)
MASS = tl.constexpr(1)
BEST = tl.constexpr(2)
TOKEN = tl.constexpr(3)
KEPT = tl.constexpr(4)
RAW_TOP = tl.constexpr(5)
RAW_MASS = tl.constexpr(6)

_COUPLED = tl.constexpr(int(Rule.COUPLED))
_IID = tl.constexpr(int(Rule.IID))
_TARGET = tl.constexpr(int(Purpose.TARGET))
_DEPTH = tl.constexpr(int(Node.DEPTH))
_RULE = tl.constexpr(int(Job.RULE))
_SEED_LOW = tl.constexpr(int(Job.SEED_LOW))
_SEED_HIGH = tl.constexpr(int(Job.SEED_HIGH))
_SEQUENCE = tl.constexpr(int(Job.SEQUENCE))
_POSITION = tl.constexpr(int(Job.POSITION))
_TEMPERATURE = tl.constexpr(int(Job.TEMPERATURE))
_FILTERED = tl.constexpr(int(Job.FILTERED))
_LOGPROBS = tl.constexpr(int(Job.LOGPROBS))
_CONSTRAINED = tl.constexpr(int(Job.CONSTRAINED))


@triton.jit
def noise(jobs, J, job, depth, first, LANE: tl.constexpr, SIZE: tl.constexpr):
    """Gumbel noise of SIZE tokens from `first` on, at a depth of a job's tree."""
    seed = seed_of(tl.load(jobs + _SEED_LOW * J + job), tl.load(jobs + _SEED_HIGH * J + job))
    position = tl.load(jobs + _POSITION * J + job) + depth
    return gumbel_tile(seed, first, position, tl.load(jobs + _SEQUENCE * J + job), LANE, SIZE)


@triton.jit(do_not_specialize=["J", "N", "slots", "plane"])
def _score(
    logits, stride, scratch, rows, jobs, J, nodes, N, cuts, slots, partials, plane, chunks, vocab,
    CHUNK: tl.constexpr,
):  # fmt: skip
    slot, chunk = tl.program_id(0), tl.program_id(1)
    row, job = job_of(rows, slot, nodes, N)
    if job < 0:
        return
    rule = tl.load(jobs + _RULE * J + job)
    raw, edited = logits + row.to(tl.int64) * stride, scratch + slot.to(tl.int64) * vocab
    out = partials + slot.to(tl.int64) * chunks + chunk
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < vocab
    x = row_logits(raw, edited, tl.load(jobs + _CONSTRAINED * J + job), tokens, inside)
    broken = tl.max((x != x).to(tl.int32)) > 0
    filtered = tl.load(jobs + _FILTERED * J + job)
    shift = tl.max(x)
    if filtered:
        shift = tl.load(cuts + 2 * slots + slot).to(tl.float32, bitcast=True)
    a = distance(x, tl.where(shift > -INF, shift, 0.0), number(jobs + _TEMPERATURE * J + job))
    if filtered:
        a = tl.where(kept(a, tokens, tl.load(cuts + slot), tl.load(cuts + slots + slot)), a, INF)
    tl.store(out + SHIFT * plane, tl.where(broken, float("nan"), shift))
    if rule >= _IID:
        tl.store(out + MASS * plane, tl.sum(tl.exp(-a)))
        tl.store(out + KEPT * plane, tl.sum((a < INF).to(tl.float32)))
    else:
        score = -a
        if rule == _COUPLED:
            depth = tl.load(nodes + _DEPTH * N + row)
            score += noise(jobs, J, job, depth, chunk * CHUNK, _TARGET, CHUNK)
        best, at = tl.max(tl.where(score == score, score, -INF), axis=0, return_indices=True)
        tl.store(out + BEST * plane, best)
        tl.store(out + TOKEN * plane, (chunk * CHUNK + at).to(tl.int32).to(tl.float32, bitcast=True))
    if tl.load(jobs + _LOGPROBS * J + job):
        y = tl.load(raw + tokens, mask=inside, other=-INF).to(tl.float32)
        top = tl.max(y)
        tl.store(out + RAW_TOP * plane, top)
        tl.store(out + RAW_MASS * plane, tl.sum(tl.exp(y - tl.where(top > -INF, top, 0.0))))


def score(logits: Tensor, rows: Tensor, batch: VerifyBatch, workspace: VerifyWorkspace) -> None:
    """Write `workspace.partials` [7, slots, chunks] of the rows [slots]."""
    size, chunks = batch.size, workspace.partials.shape[2]
    _score[(size.slots, chunks)](
        logits,
        logits.stride(0),
        workspace.scratch,
        rows,
        batch.jobs,
        size.jobs,
        batch.nodes,
        size.rows,
        workspace.cuts,
        size.slots,
        workspace.partials,
        workspace.partials.stride(0),
        chunks,
        size.vocab,
        CHUNK=workspace.chunk,
        num_warps=WARPS,
    )


def variants() -> Iterator[Variant]:
    """Ways to compile `score`, see `Variant`."""
    for dtype in ("bf16", "fp32"):
        yield Variant(f"score {dtype}", _score, signature(_score, dtype, ["CHUNK"]), {"CHUNK": CHUNK}, WARPS)
