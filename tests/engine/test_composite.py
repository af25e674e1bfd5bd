"""The composite drafter: how trees are merged, and how parts at different lengths are kept in step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.drafters.composite import CompositeDrafter, merge
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.drafters.ngram import merge as spell
from gammaray.engine.drafting import GuardedDrafter
from gammaray.types import SamplingParams

Path = tuple[int, ...]
PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    tree = spell(draw(PATHS))
    shares = st.floats(0, 1, width=16)
    confidence = draw(st.lists(shares, min_size=len(tree), max_size=len(tree)))
    return DraftTree(tree.tokens, tree.parents, confidence=tuple(confidence))


def view(length: int, depth: int = 3, width: int = 2) -> DraftView:
    return DraftView("r", length, depth, width, SamplingParams(), 0)


@given(drafts=st.lists(trees(), min_size=1, max_size=3), nodes=st.integers(1, 20))
def test_the_union_is_merged_and_the_likeliest_nodes_stay(drafts: list[DraftTree], nodes: int) -> None:
    """Against a naive union: a prefix that is there twice, a node without its parent, a wrong confidence."""
    union: dict[Path, float] = {}
    for draft in drafts:
        for path, share in zip(draft.paths, draft.confidence or (), strict=True):
            union[path] = max(share, union.get(path, 0.0))

    def chance(path: Path) -> float:
        product = 1.0
        for end in range(1, len(path) + 1):
            product *= union[path[:end]]
        return product

    merged = merge(drafts, nodes)
    chosen = merged.paths
    assert len(chosen) == len(set(chosen)) == min(nodes, len(union))
    assert merged.confidence == tuple(union[path] for path in chosen)
    left = [chance(path) for path in set(union) - set(chosen)]
    assert min(map(chance, chosen)) >= max(left, default=0.0)


@given(drafts=st.lists(trees(), min_size=2, max_size=3), nodes=st.integers(1, 20))
def test_where_one_part_does_not_tell_the_first_come_first(drafts: list[DraftTree], nodes: int) -> None:
    drafts[-1] = DraftTree(drafts[-1].tokens, drafts[-1].parents)
    merged = merge(drafts, nodes)
    order = list(dict.fromkeys(path for draft in drafts for path in draft.paths))
    assert (merged.paths, merged.confidence) == (order[:nodes], None)


class Part:
    """Drafts `path` wherever it is up to date; catches up as far as `reach`."""

    vocab_size: int | None = 100
    top = 0
    layers: tuple[int, ...] = ()

    def __init__(self, path: Path = (), reach: int | None = None) -> None:
        self.path, self.reach = path, reach
        self.known: dict[str, int] = {}
        self.given: list[tuple[list[int], torch.Tensor | None]] = []
        self.observed: list[torch.Tensor] = []

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views))

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        ready = [v for v in ticket.views if self.known.get(v.rid) == v.length and self.path]
        return {v.rid: spell([self.path[: v.nodes]]) for v in ready}

    def commit(self, rid: str, tokens: Sequence[int], features: torch.Tensor | None = None) -> None:
        self.given.append((list(tokens), features))
        self.known[rid] += len(tokens)

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        self.known[rid] = len(tokens) if self.reach is None else min(self.reach, len(tokens))

    def release(self, rid: str) -> None:
        self.known.pop(rid, None)

    def length(self, rid: str) -> int | None:
        return self.known.get(rid)

    def observe(self, rid: str, tree: DraftTree | None, likeliest: torch.Tensor) -> None:
        self.observed.append(likeliest)


class Head(Part):
    def __init__(self, layers: tuple[int, ...], reach: int, path: Path = ()) -> None:
        super().__init__(path, reach)
        self.layers = layers


def states(first: int, end: int, layers: Sequence[int]) -> torch.Tensor:
    """Two numbers of each layer and position."""
    rows = [[100.0 * position + layer] * 2 for position in range(first, end) for layer in layers]
    return torch.tensor(rows).reshape(end - first, -1)


def drafted(drafter: CompositeDrafter, length: int, depth: int = 3, width: int = 2) -> DraftTree | None:
    return drafter.collect(drafter.begin([view(length, depth, width)]), 0.0).get("r")


def test_parts_at_different_lengths_each_get_their_own_tokens_and_layers() -> None:
    """What the target recomputes for the one that knows least, others have already."""
    far, near, plain = Head((1, 3), 4, (7,)), Head((2,), 2, (8,)), Part((9,))
    drafter = CompositeDrafter({"far": far, "near": near, "plain": plain}, 100)
    assert drafter.layers == (1, 2, 3)
    drafter.catch_up("r", range(6))
    assert drafter.length("r") == 2
    drafter.commit("r", [2, 3, 4], states(2, 5, drafter.layers))  # a chunk of the prompt
    assert drafter.length("r") == 5
    drafter.commit("r", [5, 6], states(5, 7, drafter.layers))
    for part, first in ((far, 4), (near, 2)):
        tokens = [token for given, _ in part.given for token in given]
        features = torch.cat([features for _, features in part.given if features is not None])
        assert tokens == list(range(first, 7))
        assert torch.equal(features, states(first, 7, part.layers))
    tree = drafted(drafter, 7)
    assert tree is not None and tree.tokens == (7, 8, 9)
    assert plain.given == []  # caught up for this draft, with everything


def test_a_head_that_lost_its_state_does_not_hold_the_others_back() -> None:
    class Losing(Head):
        def commit(self, rid: str, tokens: Sequence[int], features: torch.Tensor | None = None) -> None:
            raise MemoryError

    other = Head((2,), 1, (8,))
    drafter = CompositeDrafter({"losing": Losing((1,), 1, (7,)), "other": other, "plain": Part((9,))}, 100)
    drafter.catch_up("r", range(4))
    drafter.commit("r", [1, 2, 3, 4], states(1, 5, (1, 2)))
    assert drafter.length("r") == 5
    tree = drafted(drafter, 5)
    assert tree is not None and tree.tokens == (8, 9)
    other.release("r")  # as for want of room: from now on all are at their end
    drafter.commit("r", [5], states(5, 6, (1, 2)))
    tree = drafted(drafter, 6)
    assert tree is not None and tree.tokens == (9,)


@pytest.mark.parametrize("broken", ["begin", "collect", "commit", "catch_up", "length", "sampled", "garbage"])
def test_a_part_that_fails_costs_its_own_draft_only(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = Part((7,)), Part((8,))

    def fail(*args: object) -> None:
        raise RuntimeError("broken")

    if broken == "sampled":  # cannot be merged, so it is left out
        monkeypatch.setattr(
            bad,
            "collect",
            lambda *args: {"r": DraftTree((7,), (-1,), "iid", torch.tensor([[7]]), torch.ones(1, 1))},
        )
    elif broken == "garbage":
        monkeypatch.setattr(bad, "collect", lambda *args: {"r": "no tree"})
    else:
        monkeypatch.setattr(bad, broken, fail)
    guarded = GuardedDrafter("both", CompositeDrafter({"bad": bad, "good": good}, 100))
    guarded.catch_up("r", [1, 2])
    for length in (2, 3):
        assert guarded.length("r") == length
        found = guarded.collect(guarded.begin([view(length)]), 0.0)["r"]
        assert found.tokens in ((8,), (7, 8))
        guarded.commit("r", [3])
    assert found.tokens == (8,) or broken in ("commit", "length")  # it is caught up instead
    assert (guarded.take_failures() > 0) == (broken != "sampled")
    guarded.release("r")
    assert guarded.length("r") is None


def test_parts_share_the_budget_and_the_first_comes_first() -> None:
    drafter = CompositeDrafter({"a": Part((1, 2, 3)), "b": Part((4, 5, 6))}, 100)
    drafter.catch_up("r", [0])
    narrow, wide = drafted(drafter, 1, depth=3, width=1), drafted(drafter, 1, depth=3, width=2)
    assert narrow is not None and narrow.tokens == (1, 2, 3)
    assert wide is not None and set(wide.tokens) == {1, 2, 3, 4, 5, 6}


def test_a_part_observes_as_much_as_it_wants_and_only_when_it_is_up_to_date() -> None:
    few, many, idle = Part(), Part(), NgramDrafter()
    few.top, many.top = 1, 3
    drafter = CompositeDrafter({"few": few, "many": many, "idle": idle}, 100)
    assert drafter.top == 3
    likeliest = torch.tensor([[5, 6, 7]])
    drafter.observe("r", None, likeliest)
    drafter.catch_up("r", [1, 2])
    drafter.observe("r", None, likeliest)  # they have not seen these tokens yet
    assert not few.observed and not many.observed
    drafted(drafter, 2)
    drafter.observe("r", None, likeliest)
    assert [one.tolist() for one in few.observed + many.observed] == [[[5]], [[5, 6, 7]]]
