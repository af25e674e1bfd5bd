"""Paged tree attention: one kernel for decode, verification of draft trees and chunked prefill.

Maths      out = sum_j exp(s_j - m) v_j / (sum_j exp(s_j - m) + exp(sink - m)) over the slots j that a token
           sees: s_j = q.k_j * scaling, capped as softcap * tanh(s_j / softcap), m their maximum. Tile by tile
           with a running m (online softmax), in powers of two, in float32 (float64 for float64).
Seen       slots below `visible` and inside the window, and the tree nodes of `ancestors`: see api.py.
Programs   (query block, key head, split). A query block is BLOCK_Q = BLOCK_M // GROUP tokens of one row times
           the GROUP heads that share the key head: they fill the M side of one tile, so that a key is read
           once for all of them. T tokens in R rows make at most T // BLOCK_Q + R blocks whatever the lengths,
           so the grid depends on sizes only. A program finds its row by binary search in `cu_seqlens`, and
           ends if there is no token for it. The splits share out the tiles of the row's real length;
           `merge.py` joins what they found.
Tiles      BLOCK_N slots that every query of the block sees take no masks. The others are taken 32 at a time:
           the ancestor words are shifted so that a query's nodes are the bits of one 32-bit word, however
           wide the tree. Tiles before the window are not read.
Bytes      context * (D + Dv) * itemsize per row, key head and query block; all else is small. Floor: bytes by
           copy bandwidth, while query rows are few.
Operations 2 * context * (D + Dv) per token and head. Floor: operations by peak, from some 200 query rows per
           key read on (H200, bf16: 790e12 / 4.8e12 * 2 bytes / 2 operations).
Layout     q [T, H, D], pools [B, PAGE, Hkv, D | Dv], out [T, H, Dv] and all of `PagedBatch`, contiguous; with
           splits, out [T, H, S, Dv] and weight [T, H, S] are partial results: see merge.py.
Never read slots that no query of the block sees (they may hold NaN); rows without tokens; tokens of no row.
Origin     online softmax: Milakov and Gimelshein, arXiv 1805.02867; tiles: Dao, arXiv 2307.08691; pages: Kwon
           et al., arXiv 2309.06180; splits: Dao et al., "Flash-Decoding", 2023; sinks: Xiao et al., arXiv
           2309.17453; trees: SpecInfer, arXiv 2305.09781. Written for gammaray.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl

from gammaray.kernels.fused.variant import Variant
from gammaray.kernels.tuning import MOST_ROWS, WIDE, WIDE_SINCE, Case, Tile, candidates

LOG2_E = tl.constexpr(1.4426950408889634)
BIG = tl.constexpr(2**31 - 1)
REGISTERS = 255  # of a thread: left alone, ptxas spills a little for the sake of occupancy

# Triton compiles anew for another alignment of an argument: not of those that differ from step to step
STEP = [
    "weight",
    "block_table",
    "cu_seqlens",
    "context_lens",
    "tree_start",
    "positions",
    "visible",
    "ancestors",
]


@triton.jit(do_not_specialize=[*STEP, "sinks", "rows", "blocks"])
def attend(
    q,
    k_pool,
    v_pool,
    out,  # [T, H, Dv]; with splits [T, H, S, Dv]
    weight,  # [T, H, S], with splits
    block_table,
    cu_seqlens,
    context_lens,
    tree_start,
    positions,
    visible,
    ancestors,
    sinks,
    rows,
    blocks,  # of a row of the block table
    SCALING: tl.constexpr,
    SOFTCAP: tl.constexpr,  # or None
    WINDOW: tl.constexpr,  # or None
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    NARROW: tl.constexpr = min(32, BLOCK_N)  # masked tiles
    PARTS: tl.constexpr = BLOCK_N // NARROW
    BLOCK_D: tl.constexpr = max(16, triton.next_power_of_2(D))
    BLOCK_DV: tl.constexpr = max(16, triton.next_power_of_2(DV))
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = _row_of(cu_seqlens, rows, block, BLOCK_Q)
    first = tl.load(cu_seqlens + row).to(tl.int32)
    last = tl.load(cu_seqlens + row + 1).to(tl.int32)
    first += (block - (first // BLOCK_Q + row)) * BLOCK_Q  # of this block
    if first >= last:
        return
    lane = tl.arange(0, BLOCK_M)
    token = first + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    valid = (lane < BLOCK_Q * GROUP) & (token < last)
    dim = tl.arange(0, BLOCK_D)
    cell = token * (KV_HEADS * GROUP) + head
    at = q + cell.to(tl.int64)[:, None] * D + dim[None, :]
    queries = tl.load(at, mask=valid[:, None] & (dim < D)[None, :], other=0.0)

    prefix = tl.load(visible + token, mask=valid, other=0).to(tl.int32)
    start = tl.load(tree_start + row).to(tl.int32)
    oldest = tl.zeros([BLOCK_M], tl.int32)
    if WINDOW is not None:
        oldest = tl.maximum(tl.load(positions + token, mask=valid, other=0).to(tl.int32) - (WINDOW - 1), 0)
    words = ancestors + token.to(tl.int64) * WORDS
    in_tree = 0
    for word in tl.static_range(WORDS):
        bits = tl.load(words + word, mask=valid, other=0)
        in_tree = tl.maximum(in_tree, tl.max((bits != 0).to(tl.int32), 0))
    length = tl.load(context_lens + row).to(tl.int32)
    begin, whole_begin, whole_end, end = _tiles(prefix, oldest, valid, in_tree, length, BLOCK_N)

    wide: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    high = tl.full([BLOCK_M], float("-inf"), wide)
    total = tl.zeros([BLOCK_M], wide)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], wide)
    table = block_table + row.to(tl.int64) * blocks
    k_pool += kv_head * D
    v_pool += kv_head * DV
    if WINDOW is not None:
        for tile in tl.range(begin * PARTS, whole_begin * PARTS, num_stages=1):
            seen, used = _seen(tile * NARROW, prefix, oldest, words, start, valid, WINDOW, WORDS, NARROW)
            high, total, acc = _tile(
                high, total, acc, queries, k_pool, v_pool, table, tile, seen, used,
                True, SCALING, SOFTCAP, KV_HEADS, D, DV, PAGE, NARROW,
            )  # fmt: skip
    for tile in tl.range(whole_begin, whole_end):
        high, total, acc = _tile(
            high, total, acc, queries, k_pool, v_pool, table, tile, None, None,
            False, SCALING, SOFTCAP, KV_HEADS, D, DV, PAGE, BLOCK_N,
        )  # fmt: skip
    for tile in tl.range(whole_end * PARTS, end * PARTS, num_stages=1):
        seen, used = _seen(tile * NARROW, prefix, oldest, words, start, valid, WINDOW, WORDS, NARROW)
        high, total, acc = _tile(
            high, total, acc, queries, k_pool, v_pool, table, tile, seen, used,
            True, SCALING, SOFTCAP, KV_HEADS, D, DV, PAGE, NARROW,
        )  # fmt: skip

    dim = tl.arange(0, BLOCK_DV)
    kept = valid[:, None] & (dim < DV)[None, :]
    if SPLIT:
        cell = cell.to(tl.int64) * tl.num_programs(2) + split
        some = tl.where(total == 0, 1.0, total)
        tl.store(weight + cell, tl.where(total == 0, float("-inf"), high + tl.log2(some)), mask=valid)
        kept = kept & (total != 0)[:, None]
    elif SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(wide) * LOG2_E
        shift = finite(tl.maximum(high, sink))
        acc *= tl.exp2(high - shift)[:, None]
        total = total * tl.exp2(high - shift) + tl.exp2(sink - shift)
    acc /= tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + cell.to(tl.int64)[:, None] * DV + dim[None, :], acc.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _row_of(cu_seqlens, rows, block, BLOCK_Q: tl.constexpr):
    """The last row whose blocks begin at or before `block`; row r's begin at cu_seqlens[r] // BLOCK_Q + r."""
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _tiles(prefix, oldest, valid, in_tree, length, BLOCK_N: tl.constexpr):
    """This split's share of the tiles [begin, end) that some query sees; all see [whole_begin, whole_end)."""
    begin = tl.min(tl.where(valid, oldest, BIG), 0) // BLOCK_N  # no node's slot is below its position
    end = tl.max(prefix, 0)
    end = tl.cdiv(tl.where(in_tree > 0, tl.maximum(end, length), end), BLOCK_N)
    count = tl.maximum(end - begin, 0)
    split, splits = tl.program_id(2), tl.num_programs(2)
    end = begin + count * (split + 1) // splits
    begin += count * split // splits
    whole_begin = tl.cdiv(tl.max(tl.where(valid, oldest, 0), 0), BLOCK_N)
    whole_begin = tl.minimum(tl.maximum(whole_begin, begin), end)
    whole_end = tl.min(tl.where(valid, prefix, BIG), 0) // BLOCK_N
    return begin, whole_begin, tl.minimum(tl.maximum(whole_end, whole_begin), end), end


@triton.jit
def _seen(
    slot, prefix, oldest, words, start, valid,
    WINDOW: tl.constexpr, WORDS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Which of the slots from `slot` on each query sees [BLOCK_M, BLOCK_N], and which any does [BLOCK_N]."""
    offset = tl.arange(0, BLOCK_N)
    slots = slot + offset
    node = tl.where(valid, slot - start, -128)  # [BLOCK_M], the node in `slot`; none for invalid queries
    word = node >> 6  # shifts round down, also below 0
    shift = (node & 63).to(tl.uint64)
    low = tl.load(words + word, mask=(word >= 0) & (word < WORDS), other=0)
    high = tl.load(words + word + 1, mask=(word >= -1) & (word < WORDS - 1), other=0)
    bits = low.to(tl.uint64, bitcast=True) >> shift | (high.to(tl.uint64, bitcast=True) << 1) << (63 - shift)
    bits = (bits & 0xFFFFFFFF).to(tl.uint32)  # bit i: the node in slot + i
    seen = ((bits[:, None] >> offset.to(tl.uint32)[None, :]) & 1) != 0
    before = slots[None, :] < prefix[:, None]
    used = slots < tl.max(prefix, 0)
    if WINDOW is not None:
        before = before & (slots[None, :] >= oldest[:, None])
        used = used & (slots >= tl.min(tl.where(valid, oldest, BIG), 0))
    used = used | (((tl.reduce(bits, 0, _or) >> offset.to(tl.uint32)) & 1) != 0)
    return seen | before, used


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _tile(
    high, total, acc, q, k_pool, v_pool, table, tile, seen, used,
    MASKED: tl.constexpr, SCALING: tl.constexpr, SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax. What nobody uses is not read: 0 times a NaN would be NaN."""
    slots = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    page = tl.load(table + slots // PAGE, mask=used, other=0) if MASKED else tl.load(table + slots // PAGE)
    place = page.to(tl.int32) * PAGE + slots % PAGE
    k = _load(k_pool, place, used, MASKED, KV_HEADS, D)  # [BLOCK_N, BLOCK_D]
    scores = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=acc.dtype)  # [BLOCK_M, BLOCK_N]
    if SOFTCAP is not None:
        scores = _tanh(scores * (SCALING / SOFTCAP)) * (SOFTCAP * LOG2_E)
    else:
        scores *= SCALING * LOG2_E
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    above = tl.maximum(high, tl.max(scores, 1))
    shift = finite(above)
    p = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(high - shift)
    v = _load(v_pool, place, used, MASKED, KV_HEADS, DV)  # [BLOCK_N, BLOCK_DV]
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee", out_dtype=acc.dtype)
    return above, total * decay + tl.sum(p, 1), acc


@triton.jit
def _load(pool, place, used, MASKED: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr):
    BLOCK_D: tl.constexpr = max(16, triton.next_power_of_2(D))  # what tl.dot needs at least
    dim = tl.arange(0, BLOCK_D)
    at = pool + place.to(tl.int64)[:, None] * (KV_HEADS * D) + dim[None, :]
    if MASKED:
        return tl.load(at, mask=used[:, None] & (dim < D)[None, :], other=0.0)
    elif D == BLOCK_D:
        return tl.load(at)
    else:
        return tl.load(at, mask=(dim < D)[None, :], other=0.0)


@triton.jit
def finite(x):
    """0 for -inf, so that -inf - x is no NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _tanh(x):
    power = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    size = (1 - power) / (1 + power)
    return tl.where(x < 0, -size, size)


@dataclass(frozen=True, slots=True)
class _Shape:
    model: str
    kind: str
    kv_heads: int
    group: int
    dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    words: int = 1
    usual: bool = (
        True  # splits with small tiles, as few query rows come with long contexts; else with large ones
    )


_SHAPES = (
    _Shape("Llama-3-8B", "bf16", 8, 4, 128),
    _Shape("Llama-3-70B", "bf16", 8, 8, 128, usual=False),
    _Shape("gpt-oss", "bf16", 8, 8, 64, window=128, sinks=True, words=2),
    _Shape("Gemma-2", "bf16", 8, 2, 256, window=4096, softcap=50.0),
    _Shape("SmolLM2", "fp16", 3, 3, 64),
    _Shape("SmolLM2", "fp32", 3, 3, 64),
    _Shape("Llama-3-8B", "fp32", 8, 4, 128),
)
_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def variants() -> Iterator[Variant]:
    """Every candidate tile at shapes of models, with what these ask for."""
    for shape in _SHAPES:
        kind, rows = _NAMES[shape.kind], (16, 32, 64, MOST_ROWS)
        cases = [Case("", WIDE_SINCE, kind, shape.dim, shape.group, count) for count in rows]
        for tile in dict.fromkeys(tile for case in cases for tile in candidates(case)):
            yield _variant(shape, tile)


def _variant(shape: _Shape, tile: Tile) -> Variant:
    split = (tile.block_m <= 32) == shape.usual
    pointers = dict.fromkeys(attend.arg_names[5:12], "*i64")  # all of the batch
    pointers |= dict.fromkeys(("q", "k_pool", "v_pool", "out"), f"*{shape.kind}")
    constants = {"SCALING": shape.dim**-0.5, "SOFTCAP": shape.softcap, "WINDOW": shape.window}
    constants |= {"KV_HEADS": shape.kv_heads, "GROUP": shape.group, "D": shape.dim, "DV": shape.dim}
    constants |= {"PAGE": 16, "WORDS": shape.words, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    constants |= {"SPLIT": split, "SINKS": shape.sinks}
    absent = {"weight": split, "sinks": shape.sinks}
    constants |= {name: None for name, given in absent.items() if not given}
    pointers |= {"out": "*fp32", "weight": "*fp32"} if split else {}
    pointers |= {"sinks": f"*{shape.kind}"} if shape.sinks else {}
    return Variant(
        f"attention {shape.model} {shape.kind} {tile.block_m}x{tile.block_n} w{tile.warps} s{tile.stages}",
        attend,
        {**pointers, "rows": "i32", "blocks": "i32"},
        constants,
        tile.warps,
        tile.stages,
        REGISTERS,
        WIDE_SINCE if tile == WIDE else 80,
    )
