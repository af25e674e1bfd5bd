"""The trees of one drafter: how they grow, what of them is given out, and what its rounds teach (`tree:`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gammaray.drafter_config import Tree
from gammaray.engine.drafters.base import DraftTree, DraftView
from gammaray.engine.drafters.growth import Branch, Growth, add_level
from gammaray.engine.drafters.outcomes import ACCEPTED, DEPTHS, Shares
from gammaray.engine.trees import LEAST, Budget, Shape, best_nodes, best_shape
from gammaray.errors import ConfigError

LEVEL_COST = 0.05  # of drafting a level, in plain steps of the target, where nothing better is known
# Shapes are solved anew after so many commits, then whenever these doubled, and at least every MOST_LEARNED.
LEARNED, MOST_LEARNED = 64, 4096
LONG_MEMORY = 0.998  # of shares: about the last 500, as a shape is for all sequences and for long


@dataclass(slots=True)
class TreeMaker:
    """What every drafter with a distribution calls, in this order:

        maker = TreeMaker(config.tree, config.draft_sampling)  # once
        growth = maker.begin(view, logits, names)  # behind the last committed token; has level 1 already
        while maker.grows(view, growth):
            ...feed the nodes from growth.fed on, and append the logits behind each to growth.rows
            maker.add_level(view, growth)
        tree = maker.finish(view, growth)  # the DraftTree
        maker.learn(growth, tokens)  # in `commit`, while the growth is still there

    A growth never has more than `view.nodes` nodes, in levels, so node i may have slot length + i of the
    target's own pages. What is given out may be a part of it, and for a dynamic tree also leaves that are no
    nodes of the growth and have no KV: a commit walks the growth by tokens (`Growth.walk`), not by index.

    static: the best `width` of every level. dynamic: grows like that, but gives out the best `view.nodes` of
    all children of all nodes that were grown on (EAGLE-2). sequoia: each node gets as many children as pay
    best by what was accepted lately. All but the first are for deterministic drafts only, and a width of 1 is
    a chain in each.
    """

    kind: Tree = "static"
    draft_sampling: bool = False
    level_cost: float = LEVEL_COST
    # By depth of the parent: how often the target chose the drafter's likeliest, second likeliest, ... token.
    accepted: list[Shares] = field(
        default_factory=lambda: [Shares(ACCEPTED, LONG_MEMORY) for _ in range(DEPTHS)]
    )
    _shapes: dict[tuple[int, int], Shape] = field(default_factory=dict)  # by depth and width
    _commits: int = 0  # since shapes were solved
    _enough: int = LEARNED

    def __post_init__(self) -> None:
        if self.draft_sampling and self.kind != "static":
            raise ConfigError(f"draft_sampling needs tree: static, not {self.kind}")

    def sampled(self, view: DraftView) -> bool:
        return self.draft_sampling and not view.sampling.greedy

    def begin(self, view: DraftView, logits: Tensor, names: Tensor | None = None) -> Growth:
        """`logits` [C]: behind the last committed token, of the tokens `names` [C]; None: of all."""
        shape = self._shape(view, len(logits)) if self.kind == "sequoia" else None
        growth = Growth(logits, shape=shape, names=names)
        self.add_level(view, growth)
        return growth

    def grows(self, view: DraftView, growth: Growth) -> bool:
        """Whether another level is worth a pass."""
        levels = max(growth.depths, default=0)
        if self.kind == "dynamic" and growth.tokens and max(growth.newest_scores()) < LEAST:
            return False
        return levels < (view.depth if growth.shape is None else len(growth.shape))

    def add_level(self, view: DraftView, growth: Growth, branch: Branch | None = None) -> None:
        """Of the whole growth, or of one draft in it."""
        add_level(growth, branch or Branch.whole(growth), view, self.sampled(view))

    def finish(self, view: DraftView, growth: Growth) -> DraftTree:
        if self.kind != "dynamic":
            return growth.tree(self.sampled(view), view.width)
        pool = growth.with_spares()
        tree = pool.tree(sampled=False, width=view.width)
        return tree.subtree(best_nodes(pool.scores, pool.parents, view.nodes))

    def learn(self, growth: Growth, tokens: Sequence[int]) -> None:
        """From `tokens` that were committed behind the growth's root: the rank of each among the drafter's
        own likeliest, whether it was drafted or not, so that narrow trees do not confirm themselves."""
        if self.kind != "sequoia":
            return
        path = growth.walk(tokens)
        for depth, (node, token) in enumerate(zip((-1, *path), tokens, strict=False)):
            if ranked := growth.ranked.get(node):
                rank = ranked.index(token) if token in ranked else None
                self.accepted[min(depth, DEPTHS - 1)].observe(rank)
        self._commits += 1
        if self._commits == self._enough:
            self._shapes.clear()
            self._commits, self._enough = 0, min(2 * self._enough, MOST_LEARNED)

    def _shape(self, view: DraftView, vocab_size: int) -> Shape:
        key = view.depth, view.width
        if key not in self._shapes:
            shares = [list(self.accepted[min(depth, DEPTHS - 1)]) for depth in range(view.depth)]
            width = min(view.width, vocab_size)
            self._shapes[key] = best_shape(
                shares, Budget.flat(view.nodes, view.depth, width, self.level_cost)
            )
        return self._shapes[key]
