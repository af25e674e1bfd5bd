"""Token Recycling: what it learns, from whom, and the shape of its trees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gammaray.engine.drafters.base import DraftTree, DraftView
from gammaray.engine.drafters.recycle import RecycleDrafter, shape
from gammaray.types import SamplingParams


def ask(drafter: RecycleDrafter, rid: str, length: int, depth: int, width: int) -> DraftTree | None:
    view = DraftView(rid, length, depth, width, SamplingParams(), 0)
    return drafter.collect(drafter.begin([view]), 0.0).get(rid)


def taught(shared: bool = False, salt: bytes = b"a") -> RecycleDrafter:
    """Of a draft 5 -> (6, 7) behind a 4, of which 6 was rejected."""
    drafter = RecycleDrafter(50, candidates=2, shared=shared)
    drafter.catch_up("r", [3, 4], salt)
    likeliest = torch.tensor([[5, 8], [7, 9], [20, 21], [30, 31]])  # behind 4, 5, 6 and 7
    drafter.observe("r", DraftTree((5, 6, 7), (-1, 0, 0)), likeliest)
    drafter.commit("r", [5, 7, 30])
    return drafter


def test_candidates_of_rejected_nodes_are_recycled_too() -> None:
    """Each row belongs to the token that it stands behind."""
    drafter = taught()
    for last, expected in ((4, (5, 8)), (5, (7, 9)), (6, (20, 21)), (7, (30, 31))):
        drafter.catch_up("r", [0, last])
        tree = ask(drafter, "r", 2, depth=1, width=2)
        assert tree is not None and tree.tokens == expected


def test_the_tree_goes_on_from_token_to_token_level_by_level() -> None:
    drafter = taught()
    drafter.catch_up("r", [0, 4])
    tree = ask(drafter, "r", 2, depth=3, width=2)
    assert tree == DraftTree((5, 8, 7, 9, 30), (-1, -1, 0, 0, 2))  # nothing is known behind 8 and 9


def test_what_was_seen_last_counts_and_of_equal_tokens_the_first() -> None:
    drafter = taught()
    drafter.observe("r", DraftTree((4, 4), (-1, 0)), torch.tensor([[1, 2], [11, 12], [13, 14]]))
    drafter.catch_up("r", [0, 4])
    tree = ask(drafter, "r", 2, depth=1, width=2)
    assert tree is not None and tree.tokens == (11, 12)


@pytest.mark.parametrize("salt", [b"a", b""])
def test_a_tenant_learns_from_itself_only(salt: bytes) -> None:
    """One memory for all salts; a memory where none was allowed."""
    drafter = taught(shared=True, salt=salt)
    drafter.release("r")
    for rid, other, known in (("own", salt, True), ("other", b"b", False)):
        drafter.catch_up(rid, [0, 4], other)
        assert (ask(drafter, rid, 2, depth=1, width=1) is not None) == known
    alone = taught(shared=False, salt=salt)
    alone.catch_up("own", [0, 4], salt)
    assert ask(alone, "own", 2, depth=1, width=1) is None


def test_only_tokens_that_were_seen_take_memory() -> None:
    drafter = taught(shared=True)
    for _ in range(3):
        drafter.observe("r", DraftTree((5, 6), (-1, 0)), torch.tensor([[1, 2], [3, 4], [5, 6]]))
    assert set(drafter._tenants[b"a"]) == {4, 5, 6, 7, 30}
    drafter.release("r")
    assert drafter.length("r") is None


@given(depth=st.integers(1, 8), width=st.integers(1, 8))
def test_the_shape_fills_its_budget(depth: int, width: int) -> None:
    nodes = shape(depth, width, depth * width)
    assert len(nodes) == depth * width or width == 1
    tree = DraftTree(tuple(range(len(nodes))), tuple(parent for parent, _ in nodes))
    assert tree.depth <= depth
    for node, (parent, rank) in enumerate(nodes):
        assert parent < node and rank < width
        assert rank == sum(other == parent for other, _ in nodes[:node])  # the likeliest first
