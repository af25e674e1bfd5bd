"""Where min_p, top_k and top_p cut a row, without sorting it.

Maths. Tokens are ordered by distance a = (max - x) / T, equal ones by id, and a filter keeps a prefix of this
order. Its last distance is found by a search over the bits of a, which order like integers: the smallest
key whose prefix holds k tokens, or the mass top_p. min_p is a limit on the key itself, and comes first; top_p
counts the mass that min_p and top_k left. Ties at the cut are kept lowest id first.

Few tokens can be at the cut, so the search runs over candidates. The row is read as BLOCK lanes; the maxima
of the lanes are a sample of the row, so the key at which the *sample* has k tokens, or the mass, bounds the
key at which the row has. Tokens farther than log(V / (1 - top_p)) together weigh less than 1 - top_p of the
maximum. What lies within the bound is copied out; only if it exceeds ROOM tokens does the search read the
whole row, three bits a pass.

Cost. One program a filtered row: V logits read two times (three for top_p without top_k), about 45 operations
a token, which is above the memory floor: 25 us a row and SM at V = 128k is expected, and torch sorts. Rows
without filters pay nothing.

Layout. cuts [3, slots] int32: the last key kept; the last id kept of those with that key; the bits of the
row's maximum. found [slots, 2, ROOM] int32: keys and ids of candidates, in order of id.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from gammaray.kernels.fused.logits import INF, distance, job_of, number, row_logits, signature
from gammaray.kernels.fused.variant import Variant
from gammaray.kernels.verification import ROOM, Job, VerifyBatch, VerifyWorkspace

BLOCK = 1024  # tokens that are compared together, and lanes of a row
WARPS = 16
REGISTERS = 128  # all that 16 warps can have: left alone, ptxas spills for the sake of a second block

_NEVER = tl.constexpr(0x7FFFFFFF)  # above the key of every distance, inf too

_PIVOTS = tl.constexpr(8)
_SLACK = tl.constexpr(1.0001)  # on bounds that come from rounded sums
_TINY = tl.constexpr(1e-37)
_TEMPERATURE = tl.constexpr(int(Job.TEMPERATURE))
_FILTERED = tl.constexpr(int(Job.FILTERED))
_TOP_K = tl.constexpr(int(Job.TOP_K))
_TOP_P = tl.constexpr(int(Job.TOP_P))
_FLOOR = tl.constexpr(int(Job.FLOOR))
_CONSTRAINED = tl.constexpr(int(Job.CONSTRAINED))


@triton.jit
def _key(a):
    return a.to(tl.int32, bitcast=True)


@triton.jit
def _weight(key):
    """exp(-a)"""
    return tl.exp(-key.to(tl.float32, bitcast=True))


@triton.jit
def _read(row, tokens, vocab):
    """Keys of some tokens of a row, above all others where there is no token."""
    raw, edited, constrained, top, temperature = row
    x = row_logits(raw, edited, constrained, tokens, tokens < vocab)
    return tl.where(tokens < vocab, _key(distance(x, top, temperature)), _NEVER)


@triton.jit
def _items(start, items, few, found, row, BLOCK: tl.constexpr, ROOM: tl.constexpr):
    """Keys and ids of BLOCK items from `start` on: of the candidates if they are `few`, else of the row."""
    ids = start + tl.arange(0, BLOCK)
    if few:
        keys = tl.load(found + ids, mask=ids < items, other=_NEVER)
        ids = tl.load(found + ROOM + ids, mask=ids < items, other=0)
    else:
        keys = _read(row, ids, items)
    return keys, ids


@triton.jit
def _search(target, massive, most, items, few, found, row, BLOCK: tl.constexpr, ROOM: tl.constexpr):
    """The smallest key, at most `most`, up to which the items count or, if `massive`, weigh the target."""
    low, high = most * 0 - 1, most
    while high - low > 1:
        step = tl.maximum((high - low) // _PIVOTS, 1)
        pivots = tl.minimum(low + step * (1 + tl.arange(0, _PIVOTS)), high)
        reached = pivots * 0.0
        for start in range(0, items, BLOCK):
            keys, _ = _items(start, items, few, found, row, BLOCK, ROOM)
            weights = tl.where(massive, _weight(keys), 1.0)
            reached += tl.sum(tl.where(keys[:, None] <= pivots[None, :], weights[:, None], 0.0), axis=0)
        enough = (reached >= target) | (pivots >= high)
        low = tl.max(tl.where(enough, low, pivots))
        high = tl.min(tl.where(enough, pivots, high))
    return high


@triton.jit
def _below(key, items, few, found, row, BLOCK: tl.constexpr, ROOM: tl.constexpr):
    """(count, weight) of the items before a key, and the count of those at it."""
    count, mass, ties = key * 0, key * 0.0, key * 0
    for start in range(0, items, BLOCK):
        keys, _ = _items(start, items, few, found, row, BLOCK, ROOM)
        count += tl.sum((keys < key).to(tl.int32))
        mass += tl.sum(tl.where(keys < key, _weight(keys), 0.0))
        ties += tl.sum((keys == key).to(tl.int32))
    return count, mass, ties


@triton.jit
def _mass(limit, vocab, row, BLOCK: tl.constexpr):
    """Weight of a row's tokens up to a key."""
    mass = limit * 0.0
    for start in range(0, vocab, BLOCK):
        keys = _read(row, start + tl.arange(0, BLOCK), vocab)
        mass += tl.sum(tl.where(keys <= limit, _weight(keys), 0.0))
    return mass


@triton.jit
def _gather(limit, vocab, found, row, BLOCK: tl.constexpr, ROOM: tl.constexpr):
    """Copy the tokens up to a key to `found`, as far as there is room, and count them."""
    count = limit * 0
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        keys = _read(row, tokens, vocab)
        near = (keys <= limit).to(tl.int32)
        here = tl.sum(near)
        if here > 0:
            at = count + tl.cumsum(near, 0) - 1
            tl.store(found + at, keys, mask=(near > 0) & (at < ROOM))
            tl.store(found + ROOM + at, tokens, mask=(near > 0) & (at < ROOM))
        count += here
    return count


@triton.jit
def _first_ties(key, wanted, none, items, few, found, row, BLOCK: tl.constexpr, ROOM: tl.constexpr):
    """The id of the `wanted`th item at a key, in order of id; `none` if there is no such item."""
    before, last = key * 0, key * 0 + none
    for start in range(0, items, BLOCK):
        keys, ids = _items(start, items, few, found, row, BLOCK, ROOM)
        equal = (keys == key).to(tl.int32)
        rank = before + tl.cumsum(equal, 0)
        last = tl.minimum(last, tl.min(tl.where((equal > 0) & (rank == wanted), ids, none)))
        before += tl.sum(equal)
    return last


@triton.jit(do_not_specialize=["J", "N", "slots"])
def _cut(
    logits, stride, scratch, rows, jobs, J, nodes, N, cuts, slots, found, vocab,
    BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    row, job = job_of(rows, slot, nodes, N)
    if job < 0:
        return
    if tl.load(jobs + _FILTERED * J + job) == 0:
        return
    constrained = tl.load(jobs + _CONSTRAINED * J + job)
    top_k, top_p = tl.load(jobs + _TOP_K * J + job), number(jobs + _TOP_P * J + job)
    cut = _key(number(jobs + _FLOOR * J + job))
    tie = cut * 0 + vocab
    raw, edited = logits + row.to(tl.int64) * stride, scratch + slot.to(tl.int64) * vocab
    found += slot.to(tl.int64) * 2 * ROOM
    lanes = tl.full([BLOCK], -INF, tl.float32)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        lanes = tl.maximum(lanes, row_logits(raw, edited, constrained, tokens, tokens < vocab))
    top = tl.max(lanes)
    temperature = number(jobs + _TEMPERATURE * J + job)
    row = (raw, edited, constrained, top, temperature)
    if (top > -INF) & (top < INF) & ((top_k > 0) | (top_p < 1)):
        # What to reach: a count, or a share of the mass that min_p left.
        target = top_k.to(tl.float32)
        if top_k == 0:
            target = top_p * _mass(cut, vocab, row, BLOCK)
            cut = tl.minimum(cut, _key(tl.log(vocab / tl.maximum(1.0 - top_p, _TINY)) + 0.01))
        # How far it can lie, by the sample, and the tokens within.
        tl.store(found + tl.arange(0, BLOCK), _key(distance(lanes, top, temperature)))
        tl.debug_barrier()
        bound = target * tl.where(top_k > 0, 1.0, _SLACK)
        cut = _search(bound, top_k == 0, cut, BLOCK, True, found, row, BLOCK, ROOM)
        tl.debug_barrier()
        count = _gather(cut, vocab, found, row, BLOCK, ROOM)
        tl.debug_barrier()
        few = count <= ROOM
        items = tl.where(few, count, vocab)
        # The cut itself: top_k, then top_p within it.
        room = count * 0 + vocab
        if top_k > 0:
            cut = _search(target, False, cut, items, few, found, row, BLOCK, ROOM)
            count, mass, ties = _below(cut, items, few, found, row, BLOCK, ROOM)
            room = tl.minimum(top_k - count, ties)
            target = top_p * (mass + room * _weight(cut))
        if top_p < 1:
            last = _search(target, True, cut, items, few, found, row, BLOCK, ROOM)
            room = tl.where(last == cut, room, vocab)
            cut = last
        count, mass, ties = _below(cut, items, few, found, row, BLOCK, ROOM)
        room = tl.minimum(room, ties)
        if top_p < 1:
            share = tl.ceil((target - mass) / tl.maximum(_weight(cut), _TINY))
            room = tl.minimum(room, tl.minimum(tl.maximum(share, 1.0), ties * 1.0).to(tl.int32))
        if room < ties:
            tie = _first_ties(cut, room, tie, items, few, found, row, BLOCK, ROOM)
    tl.store(cuts + slot, cut)
    tl.store(cuts + slots + slot, tie)
    tl.store(cuts + 2 * slots + slot, top.to(tl.int32, bitcast=True))


def cut(logits: Tensor, rows: Tensor, batch: VerifyBatch, workspace: VerifyWorkspace) -> None:
    """Write `workspace.cuts` [3, slots] of the rows [slots] whose job filters."""
    size = batch.size
    _cut[(size.slots,)](
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
        workspace.found,
        size.vocab,
        BLOCK=min(BLOCK, workspace.chunk),
        ROOM=workspace.found.shape[2],
        num_warps=WARPS,
        maxnreg=REGISTERS,
    )


def variants() -> Iterator[Variant]:
    """Ways to compile `cut`, see `Variant`."""
    constants = {"BLOCK": BLOCK, "ROOM": ROOM}
    for dtype in ("bf16", "fp32"):
        types = signature(_cut, dtype, constants)
        yield Variant(f"thresholds {dtype}", _cut, types, constants, WARPS, registers=REGISTERS)
