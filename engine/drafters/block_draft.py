"""The tokens of blocks, one after another: each from its place's logits and the bias of the token before it.

The confidence head's c is the probability that a place's token is accepted where those before it were. It is
the confidence of the first child of a node. Of the rest, others get a share by the drafter's own
probabilities, or, where tokens were drawn and must not be looked at, what a further try of equal odds gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gammaray.engine.batch import transfer
from gammaray.engine.drafters.base import DraftTree, DraftView
from gammaray.engine.drafters.block_model import BlockModel
from gammaray.engine.drafters.growth import Growth
from gammaray.engine.drafters.markov import ConfidenceHead, MarkovHead
from gammaray.engine.drafters.tree_maker import TreeMaker


@dataclass(slots=True)
class BlockDraft:
    """A draft, and what the heads said behind each node so far, the last committed token first."""

    view: DraftView
    last: int  # the last committed token
    hidden: Tensor  # [D, H] of the places that are drafted
    base: Tensor  # [D, Vd], their logits without bias
    growth: Growth = field(default_factory=lambda: Growth(torch.empty(0)))
    states: list[Tensor] = field(default_factory=list)  # [r] each, of the Markov head
    chances: list[float] = field(default_factory=list)  # of the confidence head

    def token(self, node: int) -> int:
        return self.last if node < 0 else self.growth.tokens[node]

    def state(self, node: int, start: Tensor) -> Tensor:
        """Of the Markov head when it reads `node`: [r], which it left when it read the one before."""
        return start if node < 0 else self.states[self.growth.parents[node] + 1]


@dataclass(frozen=True, slots=True)
class Heads:
    """What reads the hidden states of a block's places."""

    model: BlockModel
    markov: MarkovHead | None
    confidence: ConfidenceHead | None

    def grow(self, drafts: Sequence[BlockDraft], maker: TreeMaker) -> None:
        """All levels of all drafts, one after another."""
        for draft, row in zip(drafts, self._behind([(draft, -1) for draft in drafts]), strict=True):
            draft.growth = maker.begin(draft.view, row)
        while unfinished := [draft for draft in drafts if maker.grows(draft.view, draft.growth)]:
            nodes = [(g, node) for g in unfinished for node in range(g.growth.fed, len(g.growth.tokens))]
            for (draft, _), row in zip(nodes, self._behind(nodes), strict=True):
                draft.growth.rows.append(row)
            for draft in unfinished:
                maker.add_level(draft.view, draft.growth)

    def _behind(self, nodes: Sequence[tuple[BlockDraft, int]]) -> Tensor:
        """Logits [M, V] behind M nodes. What else the heads say is kept in their drafts."""
        places = [(draft, draft.growth.depth(node)) for draft, node in nodes]
        hidden = torch.stack([draft.hidden[place] for draft, place in places])  # [M, H]
        logits = torch.stack([draft.base[place] for draft, place in places])  # [M, Vd]
        embedded = None
        if (markov := self.markov) is not None:
            previous = torch.tensor([draft.token(node) for draft, node in nodes])
            embedded = markov.embed(transfer(previous, hidden.device))  # [M, r]
            start = torch.zeros_like(embedded[0])
            before = torch.stack([draft.state(node, start) for draft, node in nodes])  # [M, r]
            mixed, states = markov.mix(embedded, hidden, before)
            logits = logits + markov.project(mixed).float()
            for (draft, _), state in zip(nodes, states, strict=True):
                draft.states.append(state)
        if self.confidence is not None:
            chances = self.confidence(hidden, embedded, [place for _, place in places]).tolist()
            for (draft, _), chance in zip(nodes, chances, strict=True):
                draft.chances.append(chance)
        return self.model.spread(logits)

    def finish(self, draft: BlockDraft, maker: TreeMaker) -> DraftTree:
        done = maker.finish(draft.view, draft.growth)
        return done if self.confidence is None else replace(done, confidence=share(done, draft.chances))


def share(tree: DraftTree, chances: Sequence[float]) -> tuple[float, ...]:
    """The confidence of each node. `chances[p + 1]`: that the first child of node p is right."""
    own = tree.confidence or ()  # where deterministic: the drafter's own probabilities
    shared: list[float] = []
    families: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        elder, chance = families.setdefault(parent, []), chances[parent + 1]
        if not elder:
            shared.append(chance)
        elif tree.drawn != "deterministic":
            shared.append(chance * (1 - chance) ** len(elder))
        else:
            others = max(1 - own[elder[0]], own[node], 1e-9)  # rounding may leave less than there is
            shared.append((1 - chance) * own[node] / others)
        elder.append(node)
    return tuple(shared)
