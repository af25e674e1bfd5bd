"""Trees that adapt: the reranking of EAGLE-2, the optimal shape of Sequoia, and how drafters grow them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations, product
from math import exp, log
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import registered
from support.tape import TapeRunner

from gammaray.config import parse
from gammaray.drafter_config import Tree
from gammaray.engine import trees
from gammaray.engine.build import build_apart
from gammaray.engine.drafters.base import DraftTree, DraftView
from gammaray.engine.drafters.growth import Growth
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.drafters.tree_maker import LEARNED, TreeMaker
from gammaray.engine.trees import LEAST, Budget, Shape, best_nodes, best_shape
from gammaray.errors import ConfigError
from gammaray.types import SamplingParams

GREEDY, HOT = SamplingParams(temperature=0.0), SamplingParams(temperature=1.3, seed=4)
VOCAB = 6


def view(depth: int, width: int, sampling: SamplingParams = GREEDY, length: int = 3) -> DraftView:
    return DraftView("r", length, depth, width, sampling, 0)


# Reranking -------------------------------------------------------------------------------------------


@st.composite
def weighed_trees(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    """Parents, and each node's probability where its parent is right; siblings sum to at most 1."""
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, 8)))]
    chances = [draw(st.floats(0.05, 1.0)) / (1 + parents.count(parent)) for parent in parents]
    return parents, chances


def cumulative(parents: Sequence[int], chances: Sequence[float]) -> list[float]:
    scores: list[float] = []
    for parent, chance in zip(parents, chances, strict=True):
        scores.append(log(chance) + (scores[parent] if parent >= 0 else 0.0))
    return scores


def closed(nodes: Sequence[int], parents: Sequence[int]) -> bool:
    return all(parents[node] in {-1, *nodes} for node in nodes)


Reranking = Callable[[Sequence[int], Sequence[float], int], list[int]]


def ours(parents: Sequence[int], chances: Sequence[float], most: int) -> list[int]:
    return best_nodes(cumulative(parents, chances), parents, most)


def each_by_itself(parents: Sequence[int], chances: Sequence[float], most: int) -> list[int]:
    """Planted: the best nodes whatever became of their parents."""
    order = sorted(range(len(parents)), key=lambda node: (-chances[node], node))
    scores = cumulative(parents, chances)
    return sorted(node for node in order[:most] if scores[node] >= LEAST)


def conditional(parents: Sequence[int], chances: Sequence[float], most: int) -> list[int]:
    """Planted: drops what is unlikely behind its parent, not what is unlikely altogether."""
    scores = cumulative(parents, chances)
    kept = sorted(range(len(parents)), key=lambda node: (-scores[node], node))[:most]
    return sorted(node for node in kept if log(chances[node]) >= LEAST)


def is_best(rerank: Reranking, parents: list[int], chances: list[float], most: int) -> bool:
    """Of all closed subsets without nodes under 0.1, the one that most is expected of."""
    scores = cumulative(parents, chances)
    likely = [node for node in range(len(parents)) if scores[node] >= log(0.1)]
    subsets = [s for size in range(min(most, len(likely)) + 1) for s in combinations(likely, size)]
    best = max(sum(exp(scores[node]) for node in s) for s in subsets if closed(s, parents))
    found = rerank(parents, chances, most)
    fits = len(found) <= most and closed(found, parents) and set(found) <= set(likely)
    return fits and sum(exp(scores[node]) for node in found) == pytest.approx(best)


@given(weighed_trees(), st.integers(1, 8))
def test_reranking_keeps_the_best_nodes_with_their_parents(
    tree: tuple[list[int], list[float]], most: int
) -> None:
    assert is_best(ours, *tree, most)


@pytest.mark.parametrize("planted", [each_by_itself, conditional])
def test_a_wrong_reranking_is_found_out(planted: Reranking) -> None:
    unlikely_root = ([-1, -1, 0, 2], [0.3, 0.6, 0.9, 0.3])  # node 2 is only 0.27, node 3 under 0.1
    assert is_best(ours, *unlikely_root, 4)
    assert is_best(ours, *unlikely_root, 2)
    assert not all(is_best(planted, *unlikely_root, most) for most in (2, 4))


# The optimal shape -----------------------------------------------------------------------------------


def all_parents(nodes: int) -> list[list[int]]:
    """Every ordered tree of so many nodes, level by level."""
    lists = product(*(range(-1, node) for node in range(nodes)))
    return [list(parents) for parents in lists if list(parents) == sorted(parents)]


def placed(parents: Sequence[int]) -> list[tuple[int, int]]:
    """(levels above, rank among its siblings) of each node."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return [(depths[node], parents[:node].count(parent)) for node, parent in enumerate(parents)]


def parents_of(shape: Shape) -> list[int]:
    parents: list[int] = []
    above = range(-1, 0)
    for level in shape:
        first = len(parents)
        parents += [node for node, count in zip(above, level, strict=True) for _ in range(count)]
        above = range(first, len(parents))
    return parents


def expected(parents: Sequence[int], accepted: Sequence[Sequence[float]]) -> float:
    """E[tau] = 1 + the sum over nodes of the products along their paths (math.md section 2)."""
    reached: list[float] = []
    for parent, (depth, rank) in zip(parents, placed(parents), strict=True):
        reached.append(accepted[depth][rank] * (reached[parent] if parent >= 0 else 1.0))
    return 1.0 + sum(reached)


def speed(parents: Sequence[int], accepted: Sequence[Sequence[float]], budget: Budget) -> float:
    levels = 1 + max(depth for depth, _ in placed(parents))
    return expected(parents, accepted) / (budget.verify[len(parents)] + levels * budget.level)


def brute_force(accepted: Sequence[Sequence[float]], budget: Budget) -> float:
    shapes = [parents for n in range(1, budget.nodes + 1) for parents in all_parents(n)]
    fitting = [
        parents
        for parents in shapes
        if all(depth < budget.depth and rank < budget.width for depth, rank in placed(parents))
    ]
    return max(speed(parents, accepted, budget) for parents in fitting)


shares = st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3).map(
    lambda row: sorted((share / max(1.0, sum(row)) for share in row), reverse=True)
)
budgets = st.builds(
    lambda nodes, depth, width, slope, level: Budget(
        nodes, depth, width, [1.0 + slope * n for n in range(nodes + 1)], level
    ),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 3),
    st.floats(0.0, 0.4),
    st.floats(0.0, 0.4),
)


def optimal(accepted: Sequence[Sequence[float]], budget: Budget) -> bool:
    parents = parents_of(best_shape(accepted, budget))
    fits = all(depth < budget.depth and rank < budget.width for depth, rank in placed(parents))
    best = brute_force(accepted, budget)
    return (
        fits and 0 < len(parents) <= budget.nodes and speed(parents, accepted, budget) == pytest.approx(best)
    )


@settings(max_examples=100)
@given(st.lists(shares, min_size=4, max_size=4), budgets)
def test_the_shape_is_the_best_of_all(accepted: list[list[float]], budget: Budget) -> None:
    assert optimal(accepted, budget)


def with_a_node_too_few(accepted: Sequence[Sequence[float]], budget: Budget) -> list[trees._Table]:
    """Planted: the subtree of a child gets one node less than it was weighed with."""
    return [table._replace(given=(table.given - 1).clip(0)) for table in SOLVE(accepted, budget)]


def with_the_next_depth(accepted: Sequence[Sequence[float]], budget: Budget) -> list[trees._Table]:
    """Planted: the acceptance of one level deeper."""
    return SOLVE([*accepted[1:], accepted[0]], budget)


def with_free_children(accepted: Sequence[Sequence[float]], budget: Budget) -> list[trees._Table]:
    """Planted: a child costs its parent's budget nothing."""
    tables = SOLVE(accepted, budget)
    return [table._replace(value=np.roll(table.value, -1, axis=1)) for table in tables]


SOLVE = trees._solve


@pytest.mark.parametrize("planted", [with_a_node_too_few, with_the_next_depth, with_free_children])
def test_a_programme_that_is_off_by_one_is_found_out(
    planted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted = [[0.5, 0.2, 0.1], [0.9, 0.05, 0.0], [0.2, 0.1, 0.1]]
    budget = Budget(5, 3, 3, [1.0, 1.0, 1.1, 1.2, 1.3, 1.8], 0.05)
    assert optimal(accepted, budget)
    monkeypatch.setattr(trees, "_solve", planted)
    assert not optimal(accepted, budget)


@given(st.lists(shares, min_size=4, max_size=4), st.integers(1, 12), st.integers(1, 4))
def test_expected_tokens_are_those_of_every_way_a_round_can_end(
    accepted: list[list[float]], nodes: int, depth: int
) -> None:
    """What the programme maximises, and 1 + the sum over nodes of the products along their paths."""
    budget = Budget.flat(nodes, depth, 3, 0.0)
    parents = parents_of(best_shape(accepted, budget))
    where = placed(parents)
    reached, tau = {-1: 1.0}, 0.0
    for node, (levels, _) in [(-1, (-1, 0)), *enumerate(where)]:
        children = {child: where[child][1] for child, parent in enumerate(parents) if parent == node}
        chances = {child: accepted[levels + 1][rank] for child, rank in children.items()}
        reached |= {child: reached[node] * chance for child, chance in chances.items()}
        tau += reached[node] * (1.0 - sum(chances.values())) * (levels + 2)
    assert tau == pytest.approx(expected(parents, accepted))
    assert tau == pytest.approx(1.0 + trees._solve(accepted, budget)[0].value[-1, -1])


def test_no_shape_of_the_same_size_beats_it_where_all_cannot_be_tried() -> None:
    """Not even by luck: 300 shapes of 24 nodes that grew by chance, and the static tree."""
    accepted = [[0.6, 0.15, 0.08, 0.04]] * 3 + [[0.4, 0.2, 0.1, 0.05]] * 3
    budget, chance = Budget.flat(24, 6, 4, 0.0), random.Random(1)
    best = expected(parents_of(best_shape(accepted, budget)), accepted)
    static = [-1] * 4 + [4 * level for level in range(5) for _ in range(4)]
    assert best > expected(static, accepted) * 1.05
    for _ in range(300):
        parents: list[int] = []
        while len(parents) < 24:
            grown = [*parents, chance.randrange(-1, len(parents))]
            if all(depth < 6 and rank < 4 for depth, rank in placed(grown)):
                parents = grown
        assert best > expected(parents, accepted)


# Growing ---------------------------------------------------------------------------------------------


def grow(maker: TreeMaker, asked: DraftView, law: Callable[[tuple[int, ...]], torch.Tensor]) -> Growth:
    """`law`: logits [V] behind tokens."""
    growth = maker.begin(asked, law(()))
    while maker.grows(asked, growth):
        for node in range(growth.fed, len(growth.tokens)):
            growth.rows.append(law(path(growth.tokens, growth.parents, node)))
        maker.add_level(asked, growth)
    return growth


def path(tokens: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, ...]:
    return (*path(tokens, parents, parents[node]), tokens[node]) if node >= 0 else ()


def random_law(seed: int, sharpness: float) -> Callable[[tuple[int, ...]], torch.Tensor]:
    def law(tokens: tuple[int, ...]) -> torch.Tensor:
        source = torch.Generator().manual_seed(hash((seed, *tokens)) % 2**63)
        return sharpness * torch.randn(VOCAB, generator=source)

    return law


def eagle2(law: Callable[[tuple[int, ...]], torch.Tensor], depth: int, width: int) -> set[tuple[int, ...]]:
    """Paths of the tree that the paper describes, each probability multiplied out."""

    def likely(tokens: tuple[int, ...]) -> float:
        rows = (law(tokens[:at]).double().softmax(-1)[token] for at, token in enumerate(tokens))
        return float(torch.stack(list(rows)).prod())

    level: list[tuple[int, ...]] = [()]
    pool: list[tuple[int, ...]] = []
    for _ in range(depth):
        fresh = [(*one, int(t)) for one in level for t in law(one).topk(min(width, VOCAB)).indices]
        pool += fresh
        level = sorted(fresh, key=likely, reverse=True)[:width]
    best = sorted(pool, key=likely, reverse=True)[: depth * width]
    return {one for one in best if likely(one) >= 0.1}


@settings(max_examples=60)
@given(st.integers(0, 999), st.floats(0.5, 4.0), st.integers(1, 4), st.integers(1, 4))
def test_a_dynamic_tree_is_the_papers(seed: int, sharpness: float, depth: int, width: int) -> None:
    """Also the leaves that the draft did not grow on, which have no KV and no slot."""
    law, asked, maker = random_law(seed, sharpness), view(depth, width), TreeMaker("dynamic")
    growth = grow(maker, asked, law)
    tree = maker.finish(asked, growth)
    found = [path(tree.tokens, tree.parents, node) for node in range(len(tree))]
    assert len(found) == len(set(found)) <= asked.nodes
    assert set(found) == eagle2(law, depth, width)
    assert len(growth.tokens) <= asked.nodes  # as many slots as the target claimed
    assert width > 1 or tree.parents == tuple(range(-1, len(tree) - 1))


def test_a_dynamic_tree_has_leaves_that_were_not_grown_on() -> None:
    """Else it would be the static one, cut."""
    law = {(): [0.5, 0.45, 0.05], (0,): [0.6, 0.3, 0.1], (1,): [0.55, 0.4, 0.05]}
    asked, maker = view(2, 2), TreeMaker("dynamic")
    growth = grow(maker, asked, lambda tokens: torch.tensor(law[tokens]).log())
    tree = maker.finish(asked, growth)
    assert [path(growth.tokens, growth.parents, node) for node in (2, 3)] == [(0, 0), (1, 0)]
    assert (len(growth.tokens), len(growth.spares)) == (4, 2)
    assert tree.confidence == pytest.approx((0.5, 0.45, 0.6, 0.55))
    deep = maker.finish(view(3, 2), growth)
    assert {path(deep.tokens, deep.parents, node) for node in range(len(deep))} >= {(0, 1), (1, 1)}


def test_drafting_stops_where_nothing_likely_is_left() -> None:
    asked, maker = view(8, 2), TreeMaker("dynamic")
    growth = grow(maker, asked, lambda tokens: torch.tensor([0.4, 0.3, 0.3]).log())
    assert max(growth.depths) == 3  # 0.064: a fourth level would be below that
    assert maker.finish(asked, growth).depth == 2


@pytest.mark.parametrize("kind", ["static", "dynamic", "sequoia"])
def test_confidence_is_the_drafters_own_probability(kind: Tree) -> None:
    law, asked, maker = random_law(5, 2.0), view(3, 3, HOT), TreeMaker(kind)
    tree = maker.finish(asked, grow(maker, asked, law))
    assert tree.confidence is not None
    for node, sure in enumerate(tree.confidence):
        above = path(tree.tokens, tree.parents, tree.parents[node])
        assert sure == pytest.approx(float(law(above).softmax(-1)[tree.tokens[node]]), rel=1e-4)


@pytest.mark.parametrize("width", [1, 3])
def test_confidence_of_a_sampled_node_is_the_same_whatever_was_drawn(width: int) -> None:
    law, maker = random_law(5, 2.0), TreeMaker("static", draft_sampling=True)
    drawn = set()
    for seed in range(8):
        asked = view(1, width, SamplingParams(temperature=1.3, seed=seed))
        tree = maker.finish(asked, grow(maker, asked, law))
        drawn.add(tree.tokens)
        q = (law(()) / 1.3).softmax(-1)
        assert tree.confidence == pytest.approx([float(q.square().sum())] * width, rel=1e-4)
    assert len(drawn) > 1


@pytest.mark.parametrize("kind", ["dynamic", "sequoia"])
def test_sampled_drafts_have_static_trees_only(kind: Tree) -> None:
    with pytest.raises(ConfigError, match="static"):
        TreeMaker(kind, draft_sampling=True)


# What rounds teach -----------------------------------------------------------------------------------


LAW = random_law(3, 2.0)


def likely(tokens: tuple[int, ...], rank: int) -> int:
    return int(LAW(tokens).sort(descending=True).indices[rank])


def taught(ranks: Sequence[int], commits: int) -> list[int]:
    """After rounds in which the target took these ranks: nodes below each child of the next draft's root."""
    asked, maker = view(4, 2), TreeMaker("sequoia")
    for _ in range(commits):
        tokens: tuple[int, ...] = ()
        for rank in ranks:
            tokens = (*tokens, likely(tokens, rank))
        maker.learn(grow(maker, asked, LAW), tokens)
    growth = grow(maker, asked, LAW)
    return [len(growth.below(child)) for child in growth.children(-1)]


def test_a_shape_follows_what_was_accepted_lately() -> None:
    assert taught([0] * 5, LEARNED) > taught([0] * 5, LEARNED - 1) == taught([0] * 5, 0)
    first, second = taught([1, 0, 0, 0, 0], LEARNED)
    assert first < second


@pytest.mark.parametrize(("depth", "width"), [(8, 1), (2, VOCAB + 2)])
def test_a_shape_keeps_to_the_width_and_to_the_vocabulary(depth: int, width: int) -> None:
    """A width of 1 is a chain, also for Sequoia; more children than there are tokens cannot be."""
    asked = view(depth, width)
    growth = grow(TreeMaker("sequoia"), asked, LAW)
    children = [len(growth.children(node)) for node in range(-1, len(growth.tokens))]
    assert max(children) == min(width, VOCAB)
    assert len(growth.tokens) <= asked.nodes


def test_a_narrow_tree_does_not_confirm_itself() -> None:
    """What the target takes is learned by its rank, although no child of that rank was drafted."""
    maker = TreeMaker("sequoia")
    for _ in range(50):
        growth = Growth(LAW(()), shape=((1,),))
        maker.add_level(view(1, 3), growth)
        assert growth.tokens == [likely((), 0)]
        maker.learn(growth, [likely((), 2), 0])
    assert maker.accepted[0][2] > 0.5 > maker.accepted[0][0]


@pytest.mark.parametrize(
    ("kind", "sampling"), [("static", GREEDY), ("sequoia", GREEDY), ("static", HOT)], ids=str
)
def test_few_columns_draft_what_the_whole_vocabulary_would(kind: Tree, sampling: SamplingParams) -> None:
    """Noise that counts columns would be another token's, so that what is drawn here is not what the target
    draws; a column given out as a token would be a wrong one."""
    names = torch.tensor([1, 2, 5])
    whole = torch.full((VOCAB,), -torch.inf).index_copy(0, names, torch.tensor([0.3, 1.0, 0.2]))
    grown = []
    for logits, own in ((whole, None), (whole[names], names)):
        maker = TreeMaker(kind, draft_sampling=sampling is HOT)
        growth = maker.begin(view(2, 2, sampling), logits, own)
        growth.rows += [logits] * len(growth.tokens)
        maker.add_level(view(2, 2, sampling), growth)
        grown.append(growth)
    one, other = grown
    assert (one.tokens, one.parents) == (other.tokens, other.parents) and len(one.tokens) > 1
    for pair, few in zip(one.q, other.q, strict=True):
        if pair is not None and few is not None:
            kept = pair[1] > 0
            assert torch.equal(pair[0][kept], few[0]) and torch.equal(pair[1][kept], few[1])


# In a drafter ----------------------------------------------------------------------------------------


def ask(drafter: ModelDrafter, *views: DraftView) -> dict[str, DraftTree]:
    return dict(drafter.collect(drafter.begin(views), 0.0))


def tape() -> TapeRunner:
    return TapeRunner(VOCAB, blocks=64, block_size=4, max_model_len=64)


@settings(max_examples=30)
@given(
    st.sampled_from(["dynamic", "sequoia"]),
    st.integers(1, 3),
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(1, 4)), min_size=1, max_size=6),
)
def test_a_part_of_a_growth_leaves_no_wrong_kv(
    kind: Tree, width: int, script: list[tuple[list[int], int]]
) -> None:
    """Committed are the drafter's likeliest tokens of some ranks: along nodes that were given out, nodes that
    were not, leaves without KV, and tokens that were never drafted. A new drafter says the same each time."""
    drafter, tokens = ModelDrafter(tape(), tree=kind), [1, 2, 3]
    drafter.catch_up("r", tokens)
    for ranks, depth in script:
        fresh = ModelDrafter(tape(), tree=kind)
        fresh.trees = drafter.trees
        fresh.catch_up("r", tokens)
        asked = view(depth, width, length=len(tokens))
        found = ask(drafter, asked).get("r")
        assert found == ask(fresh, asked).get("r")
        state = drafter._states["r"]
        assert found is None or (
            state.growth is not None and (state.growth.shape is None) == (kind == "dynamic")
        )
        assert list(drafter.anticipate()) == []
        emitted: list[int] = []
        for rank in [*ranks, 0]:
            law = torch.tensor(drafter.runner._logits((*tokens, *emitted)))  # type: ignore[attr-defined]
            emitted.append(int(law.sort(descending=True).indices[rank]))
        tokens += emitted
        drafter.commit("r", emitted)
        committed, _ = drafter.committed("r") or ([], [])
        assert committed == tokens[: len(committed)]
    drafter.release("r")
    assert drafter.cache.pool.used == 0


@pytest.mark.parametrize("kind", ["static", "dynamic", "sequoia"])
def test_a_draft_worker_grows_the_trees_that_are_configured(kind: Tree, tmp_path: Path) -> None:
    entry = registered.model(tmp_path)["model"] | {"tree": kind}
    own = registered.save(tmp_path / "target", registered.target())
    built = build_apart(parse({"target": {"model": own}, "drafters": {"d": entry}}, "test"), "d")
    assert isinstance(built, ModelDrafter)
    assert built.trees.kind == kind


@pytest.mark.parametrize("sampled", [False, True])
def test_what_was_drafted_ahead_behind_a_chain_is_no_part_of_it(sampled: bool) -> None:
    """A chain verified in part: its rest is the next draft, without the guess that stood at its end."""
    drafter, fresh = ModelDrafter(tape(), sampled), ModelDrafter(tape(), sampled)
    drafter.catch_up("r", [1, 2, 3])
    tree = ask(drafter, view(3, 1, HOT))["r"]
    assert sum(1 for _ in drafter.anticipate(rows=1)) > 1
    drafter.commit("r", tree.tokens[:2])
    fresh.catch_up("r", [1, 2, 3, *tree.tokens[:2]])
    asked = view(3, 1, HOT, length=5)
    later, expected = ask(drafter, asked)["r"], ask(fresh, asked)["r"]
    assert later.tokens == expected.tokens and later.tokens[0] == tree.tokens[2]
    assert later.confidence == pytest.approx(expected.confidence)
    assert len(later) == 3 == (3 if later.q_ids is None else len(later.q_ids))
