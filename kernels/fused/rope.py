"""Rotary embedding and KV write in one pass, from the fused projection to rotated queries and the pool.

Maths      y = x * cos + swap(x) * sin, where swap exchanges dimension i with i + D/2 and sin is negative in
           the first half: RoPE (Su et al., arXiv 2104.09864, eq. 34) as Llama pairs it. Values are copied.
Bytes      2 * T * (H + 2 Hkv) * D * itemsize, each number read once and written once, and 2 * T * D for the
           angles. Operations: 3 a number, in float32; far below what the bytes take.
Floor      the bytes by the copy bandwidth: 512 tokens of Llama-3-8B (32 + 2 * 8 heads of 128, bf16) are
           13 MB, 3 us at 4.8 TB/s. In torch it is five kernels and about three times the bytes.
Layout     qk [T, H + Hkv, D] and v [T, Hkv, D], contiguous within a token; cos, sin [T, D]; slots [T] int64;
           q [T, H, D] contiguous; one layer's pools [B, block_size, Hkv, D], contiguous.
Programs   (tokens, blocks of heads). A token of slot -1 pads: nothing of it reaches the pool.
Origin     own design.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from gammaray.kernels.fused.variant import Variant

BLOCK_HEADS = 8


@triton.jit(do_not_specialize=["slots"])  # which begin anywhere in a step's tensor
def _rotate_and_write(
    qk,
    v,
    cos,
    sin,
    slots,
    q,
    k_pool,
    v_pool,
    qk_stride,  # between tokens
    v_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Programs (tokens, blocks of heads); heads are numbered queries, keys, values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_DIM)
    inside = (column < DIM)[None, :]
    work = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    keys: tl.constexpr = HEADS + KV_HEADS  # heads that turn
    turning = (head < keys)[:, None] & inside
    row = qk + token * qk_stride + head[:, None] * DIM
    x = tl.load(row + column[None, :], mask=turning, other=0.0).to(work)
    swapped = tl.load(row + ((column + DIM // 2) % DIM)[None, :], mask=turning, other=0.0).to(work)
    c = tl.load(cos + token * DIM + column, mask=column < DIM, other=0.0).to(work)
    s = tl.load(sin + token * DIM + column, mask=column < DIM, other=0.0).to(work)
    turned = (x * c[None, :] + swapped * s[None, :]).to(q.dtype.element_ty)
    in_q = token * (HEADS * DIM) + head[:, None] * DIM + column[None, :]
    tl.store(q + in_q, turned, mask=(head < HEADS)[:, None] & inside)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        start = slot * (KV_HEADS * DIM)
        in_k = start + (head - HEADS)[:, None] * DIM + column[None, :]
        tl.store(k_pool + in_k, turned, mask=turning & (head >= HEADS)[:, None])
        is_value = inside & ((head >= keys) & (head < keys + KV_HEADS))[:, None]
        in_v = (head - keys)[:, None] * DIM + column[None, :]
        value = tl.load(v + token * v_stride + in_v, mask=is_value)
        tl.store(v_pool + start + in_v, value, mask=is_value)


def rotate_and_write(
    qk: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor, q: Tensor
) -> Tensor:
    """Fill q [T, H, D] with the rotated queries of qk [T, H + Hkv, D]; keys, rotated, and v go to the pools.

    cos and signed sin [T, D] (see `engine.lean`), slots [T] physical, -1: not to be written. Returns q.
    """
    tokens, heads, dim = q.shape
    kv_heads = v.shape[1]
    grid = (tokens, triton.cdiv(heads + 2 * kv_heads, BLOCK_HEADS))
    with torch.cuda.device_of(q):
        _rotate_and_write[grid](
            qk,
            v,
            cos,
            sin,
            slots,
            q,
            k_pool,
            v_pool,
            qk.stride(0),
            v.stride(0),
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            BLOCK_HEADS=BLOCK_HEADS,
            BLOCK_DIM=triton.next_power_of_2(dim),
        )
    return q


def variants() -> Iterator[Variant]:
    for name, kind, heads, kv_heads, dim in (
        ("llama-3-8b", "bf16", 32, 8, 128),
        ("llama-3-70b", "bf16", 64, 8, 128),
        ("smollm2", "fp16", 9, 3, 64),
        ("smollm2", "fp32", 9, 3, 64),
    ):
        pointers = dict.fromkeys(("qk", "v", "cos", "sin", "q", "k_pool", "v_pool"), f"*{kind}")
        yield Variant(
            f"rope {name} {kind}",
            _rotate_and_write,
            pointers | {"slots": "*i64", "qk_stride": "i32", "v_stride": "i32"},
            {
                "HEADS": heads,
                "KV_HEADS": kv_heads,
                "DIM": dim,
                "BLOCK_HEADS": BLOCK_HEADS,
                "BLOCK_DIM": triton.next_power_of_2(dim),
            },
        )
