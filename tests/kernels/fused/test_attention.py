"""The fused attention kernel, interpreted, against the definition computed in float64.

Wherever no token looks there is NaN, in the pools, in the workspace and in the numbers of padding: a kernel
that reads too much fails whatever it then does. float16's tolerance is that of weights rounded to float16.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.paged import NAN, Seq, batch_of, pools_of, random_tree
from torch import Tensor

from gammaray.kernels import api, reference
from gammaray.kernels.api import PagedBatch, paged_tree_attention, plan_attention
from gammaray.kernels.backend import VARIABLE
from gammaray.kernels.fused import attention, launch
from gammaray.kernels.fused.launch import Scores
from gammaray.kernels.tuning import Case, Tile
from gammaray.kernels.workspace import Workspace

SMALL = Tile(16, 16, 4, 2)
PLAIN = Scores(0.4)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 3e-3}
IDLE = 7.0  # what the output holds before


def attend(
    batch: PagedBatch,
    pools: tuple[Tensor, Tensor],
    q: Tensor,
    scores: Scores,
    tile: Tile = SMALL,
    splits: int = 1,
) -> Tensor:
    """The kernel's answer, from a workspace full of NaN."""
    window = scores.window
    if window is not None:
        batch = replace(batch, ancestors=api._nearest(batch.ancestors, window))
    tokens, heads, dims = *q.shape[:2], pools[1].shape[3]
    workspace = Workspace()
    memory = workspace.take(
        (tokens * heads * splits * (dims + 1),), torch.promote_types(q.dtype, torch.float32), q.device
    )
    memory.fill_(NAN)
    out = torch.full((tokens, heads, dims), IDLE, dtype=q.dtype)
    return launch.paged_tree_attention(q, *pools, batch, scores, workspace, tile=tile, splits=splits, out=out)


def check(
    rows: list[Seq],
    dtype: torch.dtype = torch.float64,
    *,
    heads: int = 2,
    kv_heads: int = 1,
    dims: tuple[int, int] = (8, 8),
    block_size: int = 4,
    words: int = 1,
    scores: Scores = PLAIN,
    tile: Tile = SMALL,
    splits: int = 1,
    idle: tuple[int, int] = (0, 0),
) -> None:
    batch = batch_of(rows, block_size, words, idle_rows=idle[0], idle_tokens=idle[1])
    k_pool, v_pool = (pool.to(dtype) for pool in pools_of(batch, kv_heads, dims, block_size, scores.window))
    q = torch.randn(len(batch.positions), heads, dims[0], generator=torch.Generator().manual_seed(2)).to(
        dtype
    )
    got = attend(batch, (k_pool, v_pool), q, scores, tile, splits)
    expected = reference.paged_tree_attention(
        q.double(), k_pool, v_pool, batch,
        scaling=scores.scaling, window=scores.window, softcap=scores.softcap, sinks=scores.sinks,
    )  # fmt: skip
    tokens = int(batch.cu_seqlens[-1])
    torch.testing.assert_close(got[:tokens].double(), expected[:tokens], atol=TOLERANCE[dtype], rtol=1e-3)
    assert (got[tokens:] == IDLE).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("seed", range(2))
def test_random_steps(dtype: torch.dtype, group: int, seed: int) -> None:
    """Catches heads mixed up in the M side (3 heads leave a lane of 16 empty), and rows found wrongly."""
    rng = random.Random(seed)
    rows = [
        Seq(rng.randrange(1, 40), pending=1, parents=random_tree(rng.randrange(9), seed)),
        Seq(rng.choice([0, 5]), pending=rng.randrange(2, 9)),
        Seq(rng.randrange(1, 90)),
        Seq(rng.randrange(20), pending=2, parents=random_tree(3, seed + 1)),
    ]
    rng.shuffle(rows)
    check(rows, dtype, heads=2 * group, kv_heads=2, splits=1 if group == 8 else 1 + seed)


@pytest.mark.parametrize("past", [0, 1, 2, 3, 14, 15, 16, 30, 31, 32, 63])
def test_one_query_at_every_edge(past: int) -> None:
    """Catches a last slot lost, or one too many read, where blocks of 4 and tiles of 16 end."""
    check([Seq(past)])


@pytest.mark.parametrize("edge", [3, 4, 15, 16, 17, 31, 32, 33, 47])
def test_prefix_ends_at_edges_before_a_tree(edge: int) -> None:
    """Catches ancestor words shifted by the wrong amount: the tree starts anywhere in a tile."""
    check([Seq(edge - 1, parents=(-1, 0, 1, 0, -1, 4))], heads=8)


def test_a_tree_of_64_nodes() -> None:
    """Catches the sign of bit 63, and bits lost where a word straddles tiles."""
    check([Seq(5, parents=random_tree(64, 0))], heads=1, tile=Tile(32, 32, 4, 2))


@pytest.mark.parametrize("block_n", [16, 32, 64])
@pytest.mark.parametrize("past", [2, 40])
def test_wider_trees_take_several_words(block_n: int, past: int) -> None:
    """Catches a second word that is not read, or read for the first one's nodes."""
    rows = [Seq(past, parents=random_tree(100, 1), fed=30), Seq(7, parents=random_tree(3, 2))]
    check(rows, heads=1, words=2, tile=Tile(32, block_n, 4, 2))


def test_a_tree_without_a_prefix() -> None:
    """Catches an empty prefix taken for one tile, or -inf - -inf in the first tile."""
    check([Seq(0, pending=0, parents=random_tree(9, 0)), Seq(0)], heads=4)


def test_very_different_lengths() -> None:
    """Catches a split or a loop bound taken from another row."""
    check([Seq(1), Seq(300), Seq(0), Seq(17, parents=(-1, -1, 0)), Seq(120)], heads=4, splits=3)


def test_fed_nodes_are_seen_by_those_below() -> None:
    """Catches nodes numbered from the first one that is fed; dead branches hold NaN."""
    check([Seq(9, pending=0, parents=(-1, 0, -1, 2, 0, 3, 5, 6), fed=5)], heads=2)


@pytest.mark.parametrize("tile", [SMALL, Tile(32, 64, 4, 2), Tile(64, 32, 4, 2)])
def test_chunked_prefill(tile: Tile) -> None:
    """Catches causal masks of a block that starts inside a tile, and of the blocks after the first."""
    check([Seq(13, pending=45), Seq(0, pending=20)], tile=tile)


@pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 40, 1000])
@pytest.mark.parametrize("splits", [1, 2])
def test_windows(window: int, splits: int) -> None:
    """Catches windows off by one, counted by slot in a tree, or shared by the queries of a block; what lies
    before the window is NaN."""
    rows = [Seq(50, parents=(-1, 0, 1, 2, 0, 4)), Seq(33, pending=20), Seq(2)]
    check(rows, heads=1, scores=Scores(0.4, window), splits=splits)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
def test_softcap_and_sinks(softcap: float | None, with_sinks: bool, splits: int) -> None:
    """Catches a sink counted once per split, in powers of e, or for another head; a cap before scaling."""
    sinks = torch.tensor([0.5, -1.0, 2.0, -float("inf")], dtype=torch.float64) if with_sinks else None
    rows = [Seq(30, parents=(-1, 0, 0)), Seq(0), Seq(4, pending=3)]
    check(rows, heads=4, kv_heads=2, scores=Scores(3.0, None, softcap, sinks), splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_queries_that_see_nothing_get_zeros(splits: int, with_sinks: bool) -> None:
    """Catches 0 / 0: the first of three tokens sees no slot at all, only the sinks."""
    batch = batch_of([Seq(3, pending=3)])
    batch.visible[0] = 0
    sinks = torch.tensor([1.0, -float("inf")], dtype=torch.float64) if with_sinks else None
    pools = pools_of(batch, 1, (8, 8), 4)
    q = torch.randn(3, 2, 8, dtype=torch.float64)
    got = attend(batch, pools, q, Scores(0.4, sinks=sinks), splits=splits)
    expected = reference.paged_tree_attention(q, *pools, batch, scaling=0.4, sinks=sinks)
    assert (got[0] == 0).all()
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's: -inf times the zeros of empty lanes
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("splits", [1, 2])
def test_scores_of_minus_infinity(softcap: float | None, splits: int) -> None:
    """Catches NaN from a first tile, or a first split, whose scores are all -inf; capped they are not."""
    batch = batch_of([Seq(39)])
    k_pool, v_pool = pools_of(batch, 1, (8, 8), 4)
    k_pool[batch.block_table[0, :8]] = -float("inf")  # 32 of 40 slots
    q = torch.rand(1, 2, 8, dtype=torch.float64) + 0.1
    scores = Scores(0.4, softcap=softcap)
    got = attend(batch, (k_pool, v_pool), q, scores, splits=splits)
    expected = reference.paged_tree_attention(q, k_pool, v_pool, batch, scaling=0.4, softcap=softcap)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_splits_share_out_rows_of_any_length(dtype: torch.dtype, splits: int) -> None:
    """Catches tiles lost or counted twice between splits, and partial results read that nobody wrote."""
    rows = [Seq(0), Seq(90), Seq(18, parents=(-1, 0)), Seq(2)]
    check(rows, dtype, heads=3, splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
def test_padding_changes_nothing(splits: int) -> None:
    """Catches work done for rows without tokens, and for tokens of no row: their metadata leads nowhere."""
    rows = [Seq(6, parents=(-1, 0)), Seq(20)]
    check(rows, heads=4, splits=splits, idle=(3, 5))


def test_rows_without_tokens_between_others() -> None:
    """Catches a binary search that stops at an empty row of the same start."""
    batch = batch_of([Seq(3), Seq(8), Seq(1), Seq(5)], seed=1)
    keep = torch.tensor([0, 2, 2, 3, 3])  # tokens of rows 0 (two), 1 (none), 2 (one), 3 (none), for 3 tokens
    batch = replace(
        batch,
        cu_seqlens=keep,
        **{name: getattr(batch, name)[:3] for name in ("positions", "visible", "ancestors", "slots")},
    )
    batch.visible[:] = torch.tensor([4, 3, 2])
    pools = pools_of(batch, 1, (8, 8), 4)
    q = torch.randn(3, 2, 8, dtype=torch.float64)
    expected = reference.paged_tree_attention(q, *pools, batch, scaling=0.4)
    torch.testing.assert_close(attend(batch, pools, q, Scores(0.4)), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dims", [(24, 40), (80, 16), (5, 3)])
@pytest.mark.parametrize("block_size", [4, 5])
def test_sizes_that_are_no_powers_of_two(dims: tuple[int, int], block_size: int) -> None:
    """Catches strides taken from padded sizes, and keys' sizes used for values."""
    check([Seq(21, parents=(-1, 0)), Seq(2)], heads=4, kv_heads=2, dims=dims, block_size=block_size, splits=2)


def test_only_tiles_that_some_query_cannot_see_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches mask work on the prefix, and tiles before the window that are read."""
    steps: list[bool] = []
    real = attention._tile

    def counted(*args: Any) -> Any:
        steps.append(args[10])
        return real(*args)

    monkeypatch.setattr(attention, "_tile", counted)
    check([Seq(70, parents=(-1, 0))])  # slots 0 to 72: four whole tiles, one masked
    assert steps == [False] * 4 + [True]
    steps.clear()
    check([Seq(70)], scores=Scores(0.4, window=40))  # slots 31 to 70: whole from 32 to 63
    assert steps == [True, False, False, True]


def test_the_api_answers_with_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a dispatch that falls back to torch: its answer would be right as well."""
    launches: list[int] = []
    real = launch.paged_tree_attention

    def counted(*args: Any, **options: Any) -> Tensor:
        launches.append(1)
        return real(*args, **options)

    monkeypatch.setattr(launch, "paged_tree_attention", counted)
    batch = batch_of([Seq(9, parents=(-1, 0, 1, 2)), Seq(2, pending=3)], idle_rows=1)
    pools = pools_of(batch, 1, (8, 8), 4)
    q = torch.randn(8, 2, 8, dtype=torch.float64)
    found = []
    for backend in ("fused", "torch"):
        monkeypatch.setenv(VARIABLE, backend)
        plan = plan_attention(batch, 4, torch.float64, group_size=2, window=3)
        found.append(paged_tree_attention(q, *pools, plan, scaling=0.4))
    assert launches == [1]
    torch.testing.assert_close(found[0], found[1], atol=1e-12, rtol=0)


def test_what_is_measured_is_a_step_of_the_case() -> None:
    """Catches a trial that times nothing: every token of it gets an answer, and a clock sees the call."""
    case = Case("cpu", 0, "float32", 16, group=2, rows=16)
    cpu = torch.device("cpu")
    out = launch.trial(case, cpu, SMALL, sequences=2, context=20, kv_heads=1)()
    assert out.shape == (16, 2, 16) and out.isfinite().all()

    def clock(run: launch.Launch) -> float:
        raise launch.OutOfResources(2, 1, "shared memory")

    assert launch.measure(case, cpu, SMALL, clock) == float("inf")
