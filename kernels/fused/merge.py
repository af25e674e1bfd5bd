"""The second reduction of split attention: joins what the splits of one row's keys found.

Maths      split i holds o_i, its softmax over its own keys, and w_i = log2 sum_j 2^s_j of their scores. Then
           out = sum_i 2^(w_i - w) o_i / (sum_i 2^(w_i - w) + 2^(sink - w)), w the maximum of all.
Programs   (token, query head): S partial results of Dv numbers each, as one tile.
Bytes      S * (Dv + 1) * 4 per token and head, written once and read once: beside the keys and values of a
           sequence with one query (D = Dv, bfloat16) 2 * GROUP * S / context, so at most 3 % for a group of
           4, as `tuning.splits` leaves 256 slots a split. Floor: a launch, or those bytes by copy bandwidth.
Layout     partial [T, H, S, Dv], weight [T, H, S], float32 (float64 for float64); out [T, H, Dv].
Never read partial results of a split without keys (w_i = -inf), tokens past the last row's.
Origin     Dao et al., "Flash-Decoding", 2023. Written for gammaray.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from gammaray.kernels.fused.attention import LOG2_E, finite
from gammaray.kernels.fused.variant import Variant
from gammaray.kernels.tuning import MOST_SPLITS


@triton.jit(do_not_specialize=["weight", "cu_seqlens", "sinks", "rows", "splits"])
def merge(
    partial,
    weight,
    out,
    cu_seqlens,
    sinks,
    rows,
    splits,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    BLOCK_DV: tl.constexpr = triton.next_power_of_2(DV)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if token >= tl.load(cu_seqlens + rows):
        return
    part = (token * HEADS + head) * splits + tl.arange(0, BLOCK_S)
    w = tl.load(weight + part, mask=tl.arange(0, BLOCK_S) < splits, other=float("-inf"))
    dim = tl.arange(0, BLOCK_DV)
    kept = (w != float("-inf"))[:, None] & (dim < DV)[None, :]
    o = tl.load(partial + part[:, None] * DV + dim[None, :], mask=kept, other=0.0)
    high = tl.max(w, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(w.dtype) * LOG2_E
        high = finite(tl.maximum(high, sink))
        total = tl.exp2(sink - high)
    else:
        high = finite(high)
        total = tl.zeros([], w.dtype)
    share = tl.exp2(w - high)
    total += tl.sum(share, 0)
    result = tl.sum(share[:, None] * o, 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + (token * HEADS + head) * DV + dim, result.to(out.dtype.element_ty), mask=dim < DV)


def variants() -> Iterator[Variant]:
    """The fewest and the most splits, with and without sinks."""
    pointers = {"partial": "*fp32", "weight": "*fp32", "out": "*bf16", "cu_seqlens": "*i64"}
    sizes = {"rows": "i32", "splits": "i32"}
    for splits in (2, MOST_SPLITS):
        shape = {"HEADS": 64, "DV": 128, "BLOCK_S": splits}
        without = shape | {"SINKS": False, "sinks": None}
        yield Variant(f"merge {splits}", merge, pointers | sizes, without)
        signature = pointers | {"sinks": "*bf16"} | sizes
        yield Variant(f"merge {splits}, sinks", merge, signature, shape | {"SINKS": True})
