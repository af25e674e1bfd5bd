"""Logits of a row as verification sees them: penalties, bias and bans, temperature, filters.

Maths. Constraints in the order of the engine's `constraints.py`: masked and banned tokens become -inf, then
the bias is added, then x * (x > 0 ? 1 / r : r) for tokens seen, minus count * frequency + (count > 0) *
presence. A token's *distance* a = (max - x) / T >= 0 is minus its scaled logit, so a processed probability
is exp(-a) over the sum of the tokens that are kept. The bits of a float32 a >= 0 order like integers.

Cost of `constrain`. Only rows with constraints: V logits read, 4 V bytes written, V / 8 bytes of mask read,
and a few bytes for each listed token; one program a row. All other rows are read where they lie.

Layout. See `kernels/verification.py`. `scratch` [slots, V] float32 is the edited copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import triton
import triton.language as tl
from torch import Tensor

from gammaray.kernels.fused.variant import Variant
from gammaray.kernels.verification import Edit, Job, Node, VerifyBatch, VerifyWorkspace

BLOCK = 2048  # tokens of a row, and listed tokens, that are edited together

INF = tl.constexpr(float("inf"))
_JOB = tl.constexpr(int(Node.JOB))
_TOKEN = tl.constexpr(int(Node.TOKEN))
_PARENT = tl.constexpr(int(Node.PARENT))
_MASK = tl.constexpr(int(Node.MASK))
_BANS = tl.constexpr(int(Node.BANS))
_BANS_END = tl.constexpr(int(Node.BANS_END))
_FIRST_ROW = tl.constexpr(int(Job.FIRST_ROW))
_CONSTRAINED = tl.constexpr(int(Job.CONSTRAINED))
_REPETITION = tl.constexpr(int(Job.REPETITION))
_REWARD = tl.constexpr(int(Job.REWARD))
_FREQUENCY = tl.constexpr(int(Job.FREQUENCY))
_PRESENCE = tl.constexpr(int(Job.PRESENCE))
_EDITS = tl.constexpr(int(Job.EDITS))
_EDITS_END = tl.constexpr(int(Job.EDITS_END))
_EDIT_TOKEN = tl.constexpr(int(Edit.TOKEN))
_EDIT_BIAS = tl.constexpr(int(Edit.BIAS))
_EDIT_COUNT = tl.constexpr(int(Edit.COUNT))
_EDIT_SEEN = tl.constexpr(int(Edit.SEEN))


@triton.jit
def job_of(rows, slot, nodes, N):
    """The row that a slot scores and its job; job -1: nothing to do."""
    row = tl.load(rows + slot)
    return row, tl.load(nodes + _JOB * N + row, mask=row >= 0, other=-1)


@triton.jit
def number(pointer):
    """The float32 whose bits an int32 holds."""
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit
def row_logits(raw, edited, constrained, tokens, inside):
    """Float32 logits of some tokens of one row, -inf outside. `raw`, `edited`: pointers to the row."""
    if constrained:
        x = tl.load(edited + tokens, mask=inside, other=-INF)
    else:
        x = tl.load(raw + tokens, mask=inside, other=-INF).to(tl.float32)
    return x


@triton.jit
def distance(x, top, temperature):
    """(top - x) / T, for x <= top, rounded like IEEE 754's: equal scaled logits are equal on every device."""
    return tl.div_rn(tl.abs(top - x), tl.zeros_like(x) + temperature)  # -0, of two zeros, has another key


@triton.jit
def kept(a, tokens, cut, tie):
    """Whether filters keep tokens at distances a: nearer than the cut, or at it and early enough."""
    key = a.to(tl.int32, bitcast=True)
    return (key < cut) | ((key == cut) & (tokens <= tie))


@triton.jit(do_not_specialize=["J", "N", "E"])
def _constrain(
    logits, stride, scratch, rows, jobs, J, nodes, N, masks, words, bans, edits, E, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    row, job = job_of(rows, slot, nodes, N)
    if job < 0:
        return
    if tl.load(jobs + _CONSTRAINED * J + job) == 0:
        return
    raw, edited = logits + row.to(tl.int64) * stride, scratch + slot.to(tl.int64) * vocab
    mask = tl.load(nodes + _MASK * N + row)
    left = 0  # tokens that are neither masked nor banned
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < vocab
        x = tl.load(raw + tokens, mask=inside, other=-INF).to(tl.float32)
        if mask >= 0:
            word = tl.load(masks + mask.to(tl.int64) * words + (tokens >> 5), mask=inside, other=0)
            x = tl.where(((word >> (tokens & 31)) & 1) != 0, x, -INF)
        tl.store(edited + tokens, x, mask=inside)
        left += tl.sum((x > -INF).to(tl.int32))
    tl.debug_barrier()
    begin, end = tl.load(nodes + _BANS * N + row), tl.load(nodes + _BANS_END * N + row)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        code = tl.load(bans + at, mask=at < end, other=0)
        x = tl.load(edited + tl.where(code < 0, ~code, code), mask=at < end, other=-INF)
        left -= tl.sum((x > -INF).to(tl.int32))
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        code = tl.load(bans + at, mask=at < end, other=0)
        banned = (at < end) & (code >= tl.where(left > 0, -0x7FFFFFFF, 0))
        tl.store(edited + tl.where(code < 0, ~code, code), at * 0.0 - INF, mask=banned)
    tl.debug_barrier()
    begin, end = tl.load(jobs + _EDITS * J + job), tl.load(jobs + _EDITS_END * J + job)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < end
        token = tl.load(edits + _EDIT_TOKEN * E + at, mask=inside, other=-1)
        bias = tl.load(edits + _EDIT_BIAS * E + at, mask=inside, other=0).to(tl.float32, bitcast=True)
        count = tl.load(edits + _EDIT_COUNT * E + at, mask=inside, other=0).to(tl.float32, bitcast=True)
        seen = tl.load(edits + _EDIT_SEEN * E + at, mask=inside, other=0)
        count += _on_path(token, row, tl.load(jobs + _FIRST_ROW * J + job), nodes, N)
        x = tl.load(edited + token, mask=inside, other=-INF) + bias
        factor = tl.where(x > 0, number(jobs + _REWARD * J + job), number(jobs + _REPETITION * J + job))
        x = tl.where((seen != 0) | (count > 0), x * factor, x)
        presence = tl.where(count > 0, number(jobs + _PRESENCE * J + job), 0.0)
        x = x - (count * number(jobs + _FREQUENCY * J + job) + presence)
        tl.store(edited + token, x, mask=inside)


@triton.jit
def _on_path(token, row, first, nodes, N):
    """How often each token is on the path from the root to a row, the row's own node included."""
    count = token * 0.0
    parent = tl.load(nodes + _PARENT * N + row)
    while parent >= 0:
        count += (token == tl.load(nodes + _TOKEN * N + row)).to(tl.float32)
        row = first + parent
        parent = tl.load(nodes + _PARENT * N + row)
    return count


def constrain(logits: Tensor, rows: Tensor, batch: VerifyBatch, workspace: VerifyWorkspace) -> None:
    """Write the edited copies, `workspace.scratch` [slots, V], of the rows [slots] that have constraints."""
    size = batch.size
    _constrain[(size.slots,)](
        logits,
        logits.stride(0),
        workspace.scratch,
        rows,
        batch.jobs,
        size.jobs,
        batch.nodes,
        size.rows,
        batch.masks,
        size.words,
        batch.bans,
        batch.edits,
        size.edits,
        size.vocab,
        BLOCK=min(BLOCK, workspace.chunk),
        num_warps=8,
        enable_fp_fusion=False,  # the truth rounds the product and the difference
    )


def variants() -> Iterator[Variant]:
    """Ways to compile `constrain`, see `Variant`."""
    for dtype in ("bf16", "fp32"):
        yield Variant(
            name=f"logits {dtype}",
            kernel=_constrain,
            signature=signature(_constrain, dtype, ["BLOCK"]),
            constants={"BLOCK": BLOCK},
            warps=8,
        )


def signature(kernel: triton.JITFunction, dtype: str, constants: Collection[str]) -> dict[str, str]:
    """Types of the arguments of one of verification's kernels, for logits of a dtype."""
    types = TYPES | {"logits": f"*{dtype}"}
    return {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}


TYPES = {
    **dict.fromkeys(
        (
            "rows",
            "next_rows",
            "jobs",
            "nodes",
            "masks",
            "bans",
            "edits",
            "cuts",
            "found",
            "q_ids",
            "emission",
            "result",
        ),
        "*i32",
    ),
    **dict.fromkeys(("scratch", "partials", "residual", "q_probs"), "*fp32"),
}
