"""A draft tree while it grows, level by level, from the logits of a draft model.

Drafters do not build trees by hand: `TreeMaker` (tree_maker.py) tells which calls they make.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import exp, inf
from typing import NamedTuple

import torch
from torch import Tensor

from gammaray.engine.batch import Row
from gammaray.engine.drafters.base import DraftTree, DraftView, Drawn
from gammaray.engine.drafters.outcomes import RANKS
from gammaray.engine.logits import draw_children, process
from gammaray.engine.trees import Shape
from gammaray.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)  # draws without noise


class Candidate(NamedTuple):
    token: int
    parent: int
    score: float


@dataclass(slots=True)
class Growth:
    """Nodes in the order they were added, parents first. `rows[i]` is there once node i was fed.

    Node -1 is the last committed token.
    """

    root: Tensor  # [C], logits of node -1; a column for each token of the draft vocabulary
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # 1: children of node -1
    scores: list[float] = field(default_factory=list)  # log-probability, added up from the branch's root
    q: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)  # ids and probabilities, [S] each
    rows: list[Tensor] = field(default_factory=list)  # [C] each
    spares: list[Candidate] = field(default_factory=list)  # children that were not good enough to grow on
    shape: Shape | None = None  # how many children each node gets; None: `width` nodes a level
    ranked: dict[int, list[int]] = field(default_factory=dict)  # by node, what may follow it, best first
    names: Tensor | None = None  # [C], the token of each column; None: the column's own number

    @property
    def fed(self) -> int:
        """Leading nodes that have KV, and so logits."""
        return len(self.rows)

    @property
    def width(self) -> int:
        """Nodes of the widest level."""
        return max(map(self.depths.count, set(self.depths)), default=0)

    def named(self, columns: Tensor) -> Tensor:
        """The tokens of columns, in any shape."""
        return columns if self.names is None else self.names[columns]

    def row(self, node: int) -> Tensor:
        return self.root if node < 0 else self.rows[node]

    def unfed(self, start: int, blocks: Sequence[int]) -> Row:
        """Feeds the nodes without KV, behind `start` tokens with KV in these blocks."""
        return Row((), start, blocks, tuple(self.tokens), tuple(self.parents), self.fed)

    def take(self, logits: Iterator[Tensor]) -> None:
        """[C] each, of the nodes that were without KV."""
        self.rows += islice(logits, len(self.tokens) - self.fed)

    def depth(self, node: int) -> int:
        return 0 if node < 0 else self.depths[node]

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def add(
        self, token: int, parent: int, score: float = 0.0, q: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depth(parent) + 1)
        self.scores.append(score)
        self.q.append(q)

    def newest_scores(self) -> list[float]:
        """Of the deepest level."""
        return self.scores[self.depths.index(max(self.depths)) :]

    def with_spares(self) -> Growth:
        """Its nodes, and behind them the spares, without KV."""
        whole = Growth(self.root, [*self.tokens], [*self.parents], [*self.depths], [*self.scores], [*self.q])
        for spare in self.spares:
            whole.add(*spare)
        return whole

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """The nodes that spell the beginning of `tokens`."""
        path: list[int] = []
        for token in tokens:
            here = self.children(path[-1] if path else -1)
            if (node := next((n for n in here if self.tokens[n] == token), None)) is None:
                break
            path.append(node)
        return path

    def below(self, node: int) -> list[int]:
        """All descendants, in their order."""
        found, inside = [], {node}
        for child in range(node + 1, len(self.tokens)):
            if self.parents[child] in inside:
                inside.add(child)
                found.append(child)
        return found

    def rerooted(self, node: int, kept: Sequence[int]) -> Growth:
        """What grows `below` a fed node, as a tree of its own."""
        place = {node: -1} | {old: new for new, old in enumerate(kept)}
        return Growth(
            root=self.rows[node],
            tokens=[self.tokens[old] for old in kept],
            parents=[place[self.parents[old]] for old in kept],
            depths=[self.depths[old] - self.depths[node] for old in kept],
            scores=[self.scores[old] - self.scores[node] for old in kept],
            q=[self.q[old] for old in kept],
            rows=[self.rows[old] for old in kept if old < self.fed],
            names=self.names,
        )

    def cut(self, depth: int) -> None:
        """Only this many levels. Does not look at tokens, so a sampled draft may be cut too."""
        keep = sum(level <= depth for level in self.depths)
        for column in (self.tokens, self.parents, self.depths, self.scores, self.q, self.rows):
            del column[keep:]

    def tree(self, sampled: bool, width: int) -> DraftTree:
        """All nodes, each with the drafter's own probability of it as confidence."""
        tokens, parents = tuple(self.tokens), tuple(self.parents)
        if not sampled:
            return DraftTree(tokens, parents, confidence=self._chances())
        q = [pair for pair in self.q if pair is not None]
        q_probs = torch.stack([probs for _, probs in q])  # [K, S]
        drawn: Drawn = "without_replacement" if width > 1 else "iid"
        # Of a draw from q against another: the same for all siblings, whatever was drawn (math.md section 3).
        agreement = tuple(q_probs.float().square().sum(-1).tolist())
        return DraftTree(tokens, parents, drawn, torch.stack([ids for ids, _ in q]), q_probs, agreement)

    def _chances(self) -> tuple[float, ...]:
        """Of each node where its parent is right."""
        above = (self.scores[parent] if parent >= 0 else 0.0 for parent in self.parents)
        return tuple(
            min(1.0, exp(own - base)) if own > -inf else 0.0
            for own, base in zip(self.scores, above, strict=True)
        )


@dataclass(slots=True)
class Branch:
    """One draft inside a growth: `levels` of it stand below node `root`, the newest is `frontier`."""

    root: int
    frontier: range
    levels: int = 0

    @classmethod
    def at(cls, root: int) -> Branch:
        return cls(root, range(root, root + 1))

    @classmethod
    def whole(cls, growth: Growth) -> Branch:
        """All of a tree whose nodes came level by level."""
        levels = max(growth.depths, default=0)
        if not levels:
            return cls.at(-1)
        return cls(-1, range(growth.depths.index(levels), len(growth.tokens)), levels)


def add_level(growth: Growth, branch: Branch, view: DraftView, sampled: bool) -> None:
    """The next level of a branch whose frontier was fed.

    Deterministic: of the frontier's children the `width` of highest cumulative log-probability (the
    expansion of EAGLE-2, arXiv 2406.16858, section 4.1, under a budget of depth x width nodes), or of each
    node the likeliest children, as many as the growth's shape gives it. Sampled: `width` children of the
    branch's root and one of every later node, a shape that does not depend on what was drawn, as exactness
    asks (math.md section 1).
    """
    logits = torch.stack([growth.row(node) for node in branch.frontier]).float()  # [F, C]
    first = len(growth.tokens)
    if sampled:
        assert growth.shape is None
        _sample(growth, branch, view, logits)
    elif growth.shape is not None:
        _shaped(growth, branch, logits, growth.shape[branch.levels])
    else:
        _best(growth, branch, view, logits)
    branch.frontier = range(first, len(growth.tokens))
    branch.levels += 1


def _best(growth: Growth, branch: Branch, view: DraftView, logits: Tensor) -> None:
    width = min(view.width, logits.shape[-1])
    values, ids = _likeliest(growth, logits, width)  # [F, W]
    candidates = [
        Candidate(token, parent, value + (growth.scores[parent] if branch.levels else 0.0))
        for parent, row, scores in zip(branch.frontier, ids.tolist(), values.tolist(), strict=True)
        for token, value in zip(row, scores, strict=True)
    ]
    candidates.sort(key=lambda node: -node.score)
    for node in candidates[:width]:
        growth.add(*node)
    growth.spares += candidates[width:]


def _likeliest(growth: Growth, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and tokens, the best first, [F, count] each, of logits [F, C]."""
    values, columns = logits.log_softmax(-1).topk(count)
    return values, growth.named(columns)


def _shaped(growth: Growth, branch: Branch, logits: Tensor, counts: Sequence[int]) -> None:
    """`counts`: of children, for each node of the frontier."""
    values, ids = _likeliest(growth, logits, min(RANKS, logits.shape[-1]))  # [F, R]
    rows = zip(branch.frontier, ids.tolist(), values.tolist(), counts, strict=True)
    for parent, tokens, scores, count in rows:
        growth.ranked[parent] = tokens
        above = growth.scores[parent] if branch.levels else 0.0
        for token, score in zip(tokens[:count], scores[:count], strict=True):
            growth.add(token, parent, above + score)


def _sample(growth: Growth, branch: Branch, view: DraftView, logits: Tensor) -> None:
    count = len(branch.frontier)
    tokens, q_ids, q_probs = draw_children(
        process(logits, [view.sampling] * count),  # [F, C]
        [view.sampling] * count,
        sequences=[view.sequence] * count,
        positions=[view.length + growth.depth(node) for node in branch.frontier],
        width=1 if branch.levels else view.width,
        drawn="without_replacement" if view.width > 1 else "iid",
        coupled=view.coupled,
        branches=[node + 1 for node in branch.frontier],
        names=growth.names,
    )  # [F, w], [F, S], [F, S]
    for row, parent in enumerate(branch.frontier):
        for token in tokens[row].tolist():
            growth.add(token, parent, q=(q_ids[row], q_probs[row]))


def candidates(nodes: Sequence[tuple[Growth, int, DraftView]], count: int) -> list[list[int]]:
    """For each node, tokens that may follow it when none of its children does, the likeliest first.

    What a coupled target draws is the best of log p + G, so the noise G, which is known, is part of it.
    """
    taken = [{growth.tokens[child] for child in growth.children(node)} for growth, node, _ in nodes]
    assert all(growth.names is None for growth, _, _ in nodes)
    logits = torch.stack([growth.row(node) for growth, node, _ in nodes]).float()  # [N, V]
    tokens, _, _ = draw_children(
        process(logits, [view.sampling for _, _, view in nodes]),
        [view.sampling if view.coupled else GREEDY for _, _, view in nodes],
        sequences=[view.sequence for _, _, view in nodes],
        positions=[view.length + growth.depth(node) for growth, node, view in nodes],
        width=min(count + max(map(len, taken)), logits.shape[1]),
        drawn="without_replacement",
        coupled=True,
    )  # [N, w]
    rows = zip(tokens.tolist(), taken, strict=True)
    return [[token for token in row if token not in there][:count] for row, there in rows]
