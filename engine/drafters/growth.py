"""A draft tree while it grows, level by level, from the logits of a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gammaray.engine.drafters.base import DraftTree, DraftView, Drawn
from gammaray.engine.logits import draw_children, process
from gammaray.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)  # draws without noise


@dataclass(slots=True)
class Growth:
    """Nodes in the order they were added, parents first. `rows[i]` is there once node i was fed.

    Node -1 is the last committed token.
    """

    root: Tensor  # [V], logits of node -1
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # 1: children of node -1
    scores: list[float] = field(default_factory=list)  # log-probability, added up from the branch's root
    q: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)  # ids and probabilities, [S] each
    rows: list[Tensor] = field(default_factory=list)  # [V] each

    @property
    def fed(self) -> int:
        """Leading nodes that have KV, and so logits."""
        return len(self.rows)

    @property
    def width(self) -> int:
        """Nodes of the widest level."""
        return max(map(self.depths.count, set(self.depths)), default=0)

    def row(self, node: int) -> Tensor:
        return self.root if node < 0 else self.rows[node]

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
            scores=[self.scores[old] for old in kept],
            q=[self.q[old] for old in kept],
            rows=[self.rows[old] for old in kept if old < self.fed],
        )

    def cut(self, depth: int) -> None:
        """Only this many levels. Does not look at tokens, so a sampled draft may be cut too."""
        keep = sum(level <= depth for level in self.depths)
        for column in (self.tokens, self.parents, self.depths, self.scores, self.q, self.rows):
            del column[keep:]

    def tree(self, sampled: bool, width: int) -> DraftTree:
        q = [pair for pair in self.q if pair is not None] if sampled else []
        drawn: Drawn = "deterministic"
        if sampled:
            drawn = "without_replacement" if width > 1 else "iid"
        return DraftTree(
            tokens=tuple(self.tokens),
            parents=tuple(self.parents),
            drawn=drawn,
            q_ids=torch.stack([ids for ids, _ in q]) if sampled else None,  # [K, S]
            q_probs=torch.stack([probs for _, probs in q]) if sampled else None,  # [K, S]
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
    expansion of EAGLE-2, arXiv 2406.16858, under a budget of depth x width nodes). Sampled: `width`
    children of the branch's root and one of every later node, a shape that does not depend on what was
    drawn, as exactness asks (math.md section 1).
    """
    logits = torch.stack([growth.row(node) for node in branch.frontier]).float()  # [F, V]
    first = len(growth.tokens)
    (_sample if sampled else _best)(growth, branch, view, logits)
    branch.frontier = range(first, len(growth.tokens))
    branch.levels += 1


def _best(growth: Growth, branch: Branch, view: DraftView, logits: Tensor) -> None:
    width = min(view.width, logits.shape[-1])
    values, ids = logits.log_softmax(-1).topk(width)  # [F, W]
    candidates = [
        (token, parent, value + (growth.scores[parent] if branch.levels else 0.0))
        for parent, row, scores in zip(branch.frontier, ids.tolist(), values.tolist(), strict=True)
        for token, value in zip(row, scores, strict=True)
    ]
    for node in sorted(candidates, key=lambda node: -node[2])[:width]:
        growth.add(*node)


def _sample(growth: Growth, branch: Branch, view: DraftView, logits: Tensor) -> None:
    count = len(branch.frontier)
    tokens, q_ids, q_probs = draw_children(
        process(logits, [view.sampling] * count),  # [F, V]
        [view.sampling] * count,
        sequences=[view.sequence] * count,
        positions=[view.length + growth.depth(node) for node in branch.frontier],
        width=1 if branch.levels else view.width,
        drawn="without_replacement" if view.width > 1 else "iid",
        coupled=view.coupled,
        branches=[node + 1 for node in branch.frontier],
    )  # [F, w], [F, S], [F, S]
    for row, parent in enumerate(branch.frontier):
        for token in tokens[row].tolist():
            growth.add(token, parent, q=(q_ids[row], q_probs[row]))


def candidates(nodes: Sequence[tuple[Growth, int, DraftView]], count: int) -> list[list[int]]:
    """For each node, tokens that may follow it when none of its children does, the likeliest first.

    What a coupled target draws is the best of log p + G, so the noise G, which is known, is part of it.
    """
    taken = [{growth.tokens[child] for child in growth.children(node)} for growth, node, _ in nodes]
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
