"""KV moves: slots src -> dst of all layers, keys and values, in one launch.

Maths      pool[l, dst[i]] = pool[l, src[i]] for all i at once: all is read before anything is written, so the
           two sets may overlap in any way, cycles included. Pairs below 0 pad and are skipped.
Bytes      2 * N * L * Hkv * (D + Dv) * itemsize, each moved slot read once and written once; no arithmetic.
Floor      that by the copy bandwidth: 96 slots of Llama-3-70B (80 layers, 8 key heads of 128, bf16) are
           63 MB, 13 us at 4.8 TB/s; below about 10 MB the launch itself, some microseconds.
Layout     k [L, B, block_size, Hkv, D] and v [L, B, block_size, Hkv, Dv], contiguous; src, dst [N] int64,
           physical slots: block * block_size + offset. A *row* is one slot of one layer, Hkv * D numbers.
Programs   (columns of a row, layers). A program owns a few columns of one layer's rows for all N moves: it
           has them in registers between reading and writing, which a barrier parts. No other program touches
           these columns, so no order of programs can spoil it.
Origin     own design.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from gammaray.kernels.fused.variant import Variant

TILE = 16 * 1024  # bytes a program holds in registers, 4 warps: 32 registers a thread
SECTOR = 32  # bytes that memory moves at least
MOST = 2 * TILE // SECTOR  # moves of one launch, in tiles of one sector's width and twice the warps


@triton.jit(do_not_specialize=["src", "dst", "moves"])  # what differs from step to step
def _move(
    k,
    v,
    src,
    dst,
    moves,
    slots,  # of a layer
    MOVES: tl.constexpr,
    COLUMNS: tl.constexpr,
    K_WIDTH: tl.constexpr,  # of a row
    V_WIDTH: tl.constexpr,
):
    """Programs (chunks of a row: the keys', then the values'; layers)."""
    chunk, first = tl.program_id(0), tl.program_id(1).to(tl.int64) * slots
    move = tl.arange(0, MOVES)
    source = tl.load(src + move, mask=move < moves, other=-1).to(tl.int64)
    target = tl.load(dst + move, mask=move < moves, other=-1).to(tl.int64)
    k_chunks: tl.constexpr = (K_WIDTH + COLUMNS - 1) // COLUMNS
    if chunk < k_chunks:
        _move_columns(k, first + source, first + target, source >= 0, chunk, COLUMNS, K_WIDTH)
    else:
        _move_columns(v, first + source, first + target, source >= 0, chunk - k_chunks, COLUMNS, V_WIDTH)


@triton.jit
def _move_columns(pool, source, target, real, chunk, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    mask = real[:, None] & (column < WIDTH)[None, :]
    tile = tl.load(pool + source[:, None] * WIDTH + column[None, :], mask=mask)
    tl.debug_barrier()  # another thread of this program may be about to read what this one overwrites
    tl.store(pool + target[:, None] * WIDTH + column[None, :], tile, mask=mask)


def move_kv(k: Tensor, v: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy slots `src` to `dst` [N], N at most MOST, in every layer of k [L, B, block_size, Hkv, D] and v.

    Pairs of -1 are skipped. A slot that is in `dst` twice has either's values.
    """
    k_width, v_width = k[0, 0, 0].numel(), v[0, 0, 0].numel()
    moves = triton.next_power_of_2(max(len(src), 1))
    columns, warps = tile(moves, max(k_width, v_width), k.element_size())
    grid = (triton.cdiv(k_width, columns) + triton.cdiv(v_width, columns), k.shape[0])
    with torch.cuda.device_of(k):
        _move[grid](
            k,
            v,
            src,
            dst,
            len(src),
            k.shape[1] * k.shape[2],
            MOVES=moves,
            COLUMNS=columns,
            K_WIDTH=k_width,
            V_WIDTH=v_width,
            num_warps=warps,
        )


def tile(moves: int, width: int, itemsize: int) -> tuple[int, int]:
    """Columns of a program, and its warps: as many bytes of each row as fit, whole sectors at least."""
    columns = min(triton.next_power_of_2(width), max(TILE // moves, SECTOR) // itemsize)
    return columns, 8 if moves * columns * itemsize > TILE else 4


def variants() -> Iterator[Variant]:
    """What serving compiles: few moves, many, and the most."""
    for name, kind, itemsize, width in (
        ("llama-3", "bf16", 2, 8 * 128),
        ("smollm2", "fp16", 2, 3 * 64),
        ("smollm2", "fp32", 4, 3 * 64),
    ):
        for moves in (1, 8, 128, MOST):
            columns, warps = tile(moves, width, itemsize)
            yield Variant(
                f"move {name} {kind} {moves} slots",
                _move,
                {
                    "k": f"*{kind}",
                    "v": f"*{kind}",
                    "src": "*i64",
                    "dst": "*i64",
                    "moves": "i32",
                    "slots": "i32",
                },
                {"MOVES": moves, "COLUMNS": columns, "K_WIDTH": width, "V_WIDTH": width},
                warps,
            )
