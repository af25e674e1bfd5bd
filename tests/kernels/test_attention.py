"""The fast path against the definition: grouping, padding, folding, windows, trees, sinks and softcap."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.paged import Seq, batch_of, pools_of, random_tree
from torch import Tensor

from gammaray.engine.batch import Row, pack
from gammaray.kernels import cpu, reference
from gammaray.kernels.api import PagedBatch, move_kv, paged_tree_attention, plan_attention, write_kv
from gammaray.kernels.invariant import Sizes
from gammaray.kernels.paths import AttentionSizes

BLOCK_SIZE, BLOCKS = 4, 64
SIZES = AttentionSizes(Sizes((2, 4, 16)), Sizes((64, 512)))
TREE = (-1, 0, -1, 2, 0, 3, 5, 6)  # two branches, one of depth 5


def tree_row(start: int, pending: int, blocks: list[int], nodes: int = 0, fed: int = 0) -> Row:
    return Row([1] * pending, start, blocks, [1] * nodes, TREE[:nodes], fed)


def step(rows: list[Row]) -> PagedBatch:
    return pack(rows, BLOCK_SIZE).paged


def pools(kv_heads: int, k_dim: int, v_dim: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(BLOCKS, BLOCK_SIZE, kv_heads, k_dim, generator=generator),
        torch.randn(BLOCKS, BLOCK_SIZE, kv_heads, v_dim, generator=generator),
    )


def poison(pool: Tensor, batch: PagedBatch) -> Tensor:
    """NaN in every slot that no row owns."""
    owned = set()
    for table, length in zip(batch.block_table.tolist(), batch.context_lens.tolist(), strict=True):
        owned |= {table[slot // BLOCK_SIZE] * BLOCK_SIZE + slot % BLOCK_SIZE for slot in range(length)}
    others = [slot for slot in range(BLOCKS * BLOCK_SIZE) if slot not in owned]
    pool = pool.clone()
    pool.flatten(0, 1)[others] = float("nan")
    return pool


MIXED = [
    tree_row(0, 21, [5, 9, 2, 30, 31, 60]),  # prefill
    tree_row(40, 1, [7, 8, 11, 1, 4, 3, 20, 21, 22, 23, 24, 25], nodes=5),
    tree_row(3, 1, [33]),  # decode, context of one block
    tree_row(10, 0, [40, 41, 42, 43, 44], nodes=8, fed=3),
    tree_row(4, 6, [50, 51, 52, 53], nodes=2),
]


@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("window", [None, 100, 6, 2, 1])
@pytest.mark.parametrize("sizes", [None, SIZES])
def test_matches_the_definition_with_unwritten_slots_poisoned(
    heads: int, kv_heads: int, window: int | None, sizes: AttentionSizes | None
) -> None:
    batch = step(MIXED)
    k_pool, v_pool = (poison(pool, batch) for pool in pools(kv_heads, 8, 8))
    q = torch.randn(len(batch.positions), heads, 8, generator=torch.Generator().manual_seed(2))
    group_size = heads // kv_heads
    plan = plan_attention(batch, BLOCK_SIZE, torch.float32, group_size=group_size, window=window, sizes=sizes)
    got = paged_tree_attention(q, k_pool, v_pool, plan, scaling=0.4)
    expected = reference.paged_tree_attention(q, k_pool, v_pool, batch, scaling=0.4, window=window)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_softcap_and_sinks(softcap: float | None, with_sinks: bool, window: int | None) -> None:
    batch = step(MIXED)
    k_pool, v_pool = (poison(pool, batch) for pool in pools(2, 8, 4))  # values of another size
    q = 3 * torch.randn(len(batch.positions), 4, 8, generator=torch.Generator().manual_seed(2))
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    plan = plan_attention(batch, BLOCK_SIZE, torch.float32, group_size=2, window=window)
    got = paged_tree_attention(q, k_pool, v_pool, plan, scaling=0.4, softcap=softcap, sinks=sinks)
    expected = reference.paged_tree_attention(
        q, k_pool, v_pool, batch, scaling=0.4, window=window, softcap=softcap, sinks=sinks
    )
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


def test_bfloat16_stays_near_float32() -> None:
    batch = step(MIXED)
    k_pool, v_pool = pools(2, 8, 8)
    q = torch.randn(len(batch.positions), 6, 8, generator=torch.Generator().manual_seed(2))
    plan = plan_attention(batch, BLOCK_SIZE, torch.bfloat16, group_size=3)
    got = paged_tree_attention(q.bfloat16(), k_pool.bfloat16(), v_pool.bfloat16(), plan, scaling=0.4)
    expected = reference.paged_tree_attention(q, k_pool, v_pool, batch, scaling=0.4)
    torch.testing.assert_close(got.float(), expected, atol=0.04, rtol=0.04)


@pytest.mark.parametrize("sizes", [None, SIZES])
def test_a_full_tree_uses_all_64_bits(sizes: AttentionSizes | None) -> None:
    parents = (-1, *range(61), 0, 62)  # node 63 is two steps from the root, its mask is negative
    row = Row([1], 2, list(range(17)), [1] * 64, parents)
    batch = step([row])
    k_pool, v_pool = (poison(pool, batch) for pool in pools(1, 8, 8))
    q = torch.randn(65, 2, 8, generator=torch.Generator().manual_seed(2))
    plan = plan_attention(batch, BLOCK_SIZE, torch.float32, group_size=2, window=40, sizes=sizes)
    got = paged_tree_attention(q, k_pool, v_pool, plan, scaling=0.4)
    expected = reference.paged_tree_attention(q, k_pool, v_pool, batch, scaling=0.4, window=40)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


CHAIN, BRANCHES = (-1, 0, 1, 2), (-1, 0, 0, 2)


@pytest.mark.parametrize(
    ("row", "lone"),
    [
        (Row([1], 21, [5, 9, 2, 30, 31, 60]), True),
        (Row([1], 7, [8, 9]), True),
        (Row((), 20, [5, 6, 7, 8, 9, 10], [1] * 4, CHAIN, 3), True),
        (Row((), 20, [5, 6, 7, 8, 9, 10], [1] * 4, BRANCHES, 3), False),
        (Row((), 2, list(range(17)), [1] * 64, range(-1, 63), 63), True),
    ],
)
def test_a_token_alone_sees_what_it_should(row: Row, lone: bool) -> None:
    """Taken for the end of a chain, a node would see its sibling, or the last of 64 bits would be a sign."""
    batch = step([row])
    assert cpu.is_lone(batch) == lone
    k_pool, v_pool = (poison(pool, batch) for pool in pools(2, 8, 8))
    q = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(2))
    for window in (None, 5):
        plan = plan_attention(batch, BLOCK_SIZE, torch.float32, group_size=3, window=window)
        got = paged_tree_attention(q, k_pool, v_pool, plan, scaling=0.4)
        expected = reference.paged_tree_attention(q, k_pool, v_pool, batch, scaling=0.4, window=window)
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


def test_blocks_in_a_run_are_read_in_place() -> None:
    batch = step([tree_row(30, 1, list(range(20, 30)), nodes=8)])
    k_pool, v_pool = (poison(pool, batch) for pool in pools(2, 8, 8))
    q = torch.randn(9, 4, 8, generator=torch.Generator().manual_seed(2))
    plan = plan_attention(batch, BLOCK_SIZE, torch.float32, group_size=2)
    assert plan.groups.groups[0].slots == range(80, 119)
    got = paged_tree_attention(q, k_pool, v_pool, plan, scaling=0.4)
    expected = reference.paged_tree_attention(q, k_pool, v_pool, batch, scaling=0.4)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("sizes", [None, SIZES])
def test_wide_trees_and_padding(sizes: AttentionSizes | None) -> None:
    """Catches a second ancestor word that is lost, and padding whose numbers are followed."""
    rows = [Seq(9, parents=random_tree(70, 1)), Seq(3), Seq(2, pending=4, parents=(-1, 0))]
    batch = batch_of(rows, BLOCK_SIZE, words=2, idle_rows=2, idle_tokens=3)
    k_pool, v_pool = (pool.float() for pool in pools_of(batch, 1, (8, 8), BLOCK_SIZE))
    q = torch.randn(len(batch.positions), 2, 8, generator=torch.Generator().manual_seed(2))
    plan = plan_attention(batch, BLOCK_SIZE, torch.float32, group_size=2, sizes=sizes)
    got = paged_tree_attention(q, k_pool, v_pool, plan, scaling=0.4)
    expected = reference.paged_tree_attention(q, k_pool, v_pool, batch, scaling=0.4)
    assert got.shape == expected.shape
    torch.testing.assert_close(got[:-3], expected[:-3], atol=2e-6, rtol=1e-5)


def test_another_branch_is_not_seen() -> None:
    batch = step([tree_row(6, 1, [3, 1, 2, 5], nodes=5)])
    k_pool, v_pool = pools(1, 8, 8)
    q = torch.randn(6, 1, 8, generator=torch.Generator().manual_seed(2))
    plan = plan_attention(batch, BLOCK_SIZE, torch.float32)
    before = paged_tree_attention(q, k_pool, v_pool, plan, scaling=0.4)
    v_pool.flatten(0, 1)[batch.slots[1]] += 100  # node 0, ancestor of nodes 0, 1 and 4
    after = paged_tree_attention(q, k_pool, v_pool, plan, scaling=0.4)
    changed = (before - after).abs().amax((1, 2)) > 1e-3
    assert changed.tolist() == [False, True, True, False, False, True]


def test_query_heads_must_share_key_heads_evenly() -> None:
    batch = step([tree_row(3, 1, [33])])
    k_pool, v_pool = pools(2, 8, 8)
    plan = plan_attention(batch, BLOCK_SIZE, torch.float32)
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        paged_tree_attention(torch.zeros(1, 3, 8), k_pool, v_pool, plan, scaling=1.0)


def test_similar_rows_share_a_call_and_large_rows_stay_alone() -> None:
    assert cpu.group_rows([1] * 8, [200, 210, 220, 230, 240, 250, 260, 270]) == [list(range(8))]
    assert cpu.group_rows([1, 512, 1], [64, 512, 80]) == [[0, 2], [1]]
    assert cpu.group_rows([1, 1, 1], [16, 8000, 20]) == [[0, 2], [1]]


def test_groups_return_tokens_to_their_order() -> None:
    rows = [tree_row(0, 17, list(range(5))), tree_row(3, 1, [33]), tree_row(600, 1, list(range(5, 5 + 151)))]
    batch = step(rows)
    batch = replace(batch, block_table=batch.block_table % BLOCKS)
    groups = cpu.group(batch, cpu.Layout(BLOCK_SIZE, torch.float32, 1, None))
    assert groups.order is not None and len(groups.groups) > 1
    fed = torch.cat([torch.arange(19) if part.tokens is None else part.tokens for part in groups.groups])
    assert fed[groups.order].tolist() == list(range(19))


def test_moves_read_everything_before_they_write() -> None:
    pool = torch.arange(24.0).view(1, 6, 4, 1, 1).clone()
    values = -pool
    move_kv(pool, values, torch.tensor([5, 6, 9]), torch.tensor([4, 5, 6]))
    assert pool.flatten()[4:10].tolist() == [5, 6, 9, 7, 8, 9]
    assert torch.equal(values, -pool)


def test_writes_land_in_their_slots() -> None:
    k_pool, v_pool = torch.zeros(3, 2, 1, 2), torch.zeros(3, 2, 1, 1)
    write_kv(torch.ones(2, 1, 2), torch.full((2, 1, 1), 5.0), k_pool, v_pool, torch.tensor([4, 1]))
    assert k_pool.sum((2, 3)).flatten().tolist() == [0, 2, 0, 0, 2, 0]
    assert v_pool.flatten().tolist() == [0, 5, 0, 0, 5, 0]
