"""KV moves against plain indexing, on pools full of numbers that tell where they came from."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from gammaray.kernels.fused import move
from gammaray.kernels.fused.move import move_kv

BLOCKS, BLOCK_SIZE, LAYERS = 4, 5, 3


def pools(k_shape: tuple[int, int], v_shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = (
        torch.randn(LAYERS, BLOCKS, BLOCK_SIZE, *shape, generator=generator) for shape in (k_shape, v_shape)
    )
    k, v = (pool.to(dtype) for pool in made)
    return k, v


def moved(pool: Tensor, src: list[int], dst: list[int]) -> Tensor:
    """The truth: all reads, then all writes."""
    expected = pool.clone()
    flat, old = expected.flatten(1, 2), pool.flatten(1, 2)
    for source, target in zip(src, dst, strict=True):
        if source >= 0:
            flat[:, target] = old[:, source]
    return expected


def check(
    src: list[int],
    dst: list[int],
    dtype: torch.dtype = torch.float32,
    k_shape: tuple[int, int] = (2, 8),
    v_shape: tuple[int, int] = (2, 8),
) -> None:
    k, v = pools(k_shape, v_shape, dtype)
    expected = moved(k, src, dst), moved(v, src, dst)
    move_kv(k, v, torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64))
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_accepted_nodes_move_down_in_all_layers(dtype: torch.dtype) -> None:
    """Catches a layer, a head or the values left behind: two sequences, one of them across blocks."""
    check([3, 7, 8, 16, 18], [2, 3, 4, 14, 15], dtype)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([1, 2, 3, 4, 5], [0, 1, 2, 3, 4]),  # down by one: each source but the first is a target as well
        ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5]),  # up by one: wrong in ascending order
        ([0, 1], [1, 0]),  # a swap: wrong in every order
        ([3, 4, 5, 9, 8, 7], [4, 5, 3, 8, 7, 9]),  # two cycles of three
        ([6, 6, 6], [6, 7, 8]),  # one source for several, and for itself
    ],
)
def test_sets_that_overlap_are_read_before_they_are_written(src: list[int], dst: list[int]) -> None:
    """Catches a write that comes before another move's read."""
    check(src, dst)


def test_random_permutations() -> None:
    """Catches an order that only the cases above have."""
    rng = random.Random(0)
    for _ in range(5):
        count = rng.randint(1, BLOCKS * BLOCK_SIZE)
        check(rng.sample(range(20), count), rng.sample(range(20), count), k_shape=(1, 4), v_shape=(1, 4))


def test_pairs_that_pad_are_skipped() -> None:
    """Catches a padded pair that writes slot -1, which is the last slot of the layer before."""
    check([4, -1, 9, -1, -1], [3, -1, 8, -1, -1])
    check([-1, -1], [-1, -1])


def test_no_moves_change_nothing() -> None:
    check([], [])


@pytest.mark.parametrize("k_shape", [(1, 1), (3, 20), (2, 24)])
def test_keys_and_values_of_their_own_width(
    k_shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the keys' width used for the values, and columns beyond a width that is no power of two."""
    monkeypatch.setattr(move, "TILE", 128)  # tiles of 32 bytes, so that a row takes several programs
    check([3, 7, 9], [1, 3, 7], k_shape=k_shape, v_shape=(3, 12))


def test_the_most_moves_fit_one_launch() -> None:
    """Catches a tile that loses sectors, or its limit: as many moves as one launch takes."""
    slots = move.MOST // 2
    k = torch.arange(2 * slots * 8, dtype=torch.float32).view(1, slots, 2, 1, 8)
    v = -k
    src = torch.randperm(move.MOST, generator=torch.Generator().manual_seed(0))
    dst = torch.arange(move.MOST)
    expected = k.flatten(1, 2)[:, src].view_as(k)
    move_kv(k, v, src, dst)
    assert torch.equal(k, expected) and torch.equal(v, -expected)


def test_tiles_keep_whole_sectors_and_few_registers() -> None:
    """Catches a choice that would spill, or that would read memory in less than 32 bytes."""
    for itemsize in (2, 4):
        for power in range(11):
            columns, warps = move.tile(2**power, 1024, itemsize)
            assert columns * itemsize >= move.SECTOR
            assert 2**power * columns * itemsize <= 128 * 32 * warps  # 32 registers a thread
