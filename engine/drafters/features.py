"""Drafters that continue the target's own hidden states with one decoder layer (EAGLE and its kin).

A `Head`, which is what is learned, reads pairs: the hidden state behind token i, and token i + 1. It tells
the hidden state behind token i + 1, from which token i + 2 is predicted, so it feeds itself while it drafts.
Its KV is therefore of pairs, and so are the keys of its prefix cache: a block that ends with token i is of no
use to a sequence that goes on otherwise behind it.

Nodes of a draft leave KV of guessed hidden states. None of it is kept: what was accepted is fed again, with
the target's own states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

import torch
from torch import Tensor

from gammaray.engine.batch import Row
from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.drafters.growth import Growth
from gammaray.engine.drafters.head_runner import Head, HeadRunner
from gammaray.engine.drafters.paged import Paged
from gammaray.engine.drafters.registry import Making
from gammaray.engine.drafters.tree_maker import TreeMaker
from gammaray.engine.kv import BlockTable, KVCache

CATCH_UP_TOKENS = 512  # committed tokens fed in a round, by all sequences together
FED_AT_ONCE = 64  # tokens of one sequence that get a pass at once: a long prompt's states do not pile up


@dataclass(slots=True)
class _State:
    """One sequence. Slots hold the KV of `pairs`, `table.computed` of them so far."""

    tokens: list[int]
    pairs: list[int]  # of the tokens with their next ones, as one number each
    table: BlockTable
    waiting: list[Tensor] = field(default_factory=list)  # features [n, F] of the pairs without KV
    last: Tensor | None = None  # hidden state [H] behind the last token, when nothing waits
    drafted: Growth | None = None  # since the last commit

    @property
    def pending(self) -> int:
        return len(self.pairs) - self.table.computed

    @property
    def begun(self) -> bool:
        """Whether the target has told anything of it; until then it waits for a place there."""
        return self.last is not None or bool(self.waiting)

    @property
    def behind(self) -> Tensor:
        """The hidden state [H] that a draft begins with."""
        assert self.last is not None
        return self.last


@dataclass(slots=True)
class _Growing:
    """A tree that gets more levels, in one pass with others."""

    view: DraftView
    state: _State
    growth: Growth
    states: list[Tensor] = field(default_factory=list)  # [H] behind each node that was fed

    def before(self, node: int) -> Tensor:
        """The hidden state [H] that `node` continues."""
        parent = self.growth.parents[node]
        return self.state.behind if parent < 0 else self.states[parent]

    @property
    def fresh(self) -> range:
        """Nodes without KV."""
        return range(self.growth.fed, len(self.growth.tokens))

    @property
    def row(self) -> Row:
        return self.growth.unfed(len(self.state.pairs), self.state.table.blocks)


class FeatureDrafter(Paged[_State]):
    """Drafts for all its sequences together, one pass of the head a level. Implements `Featured`."""

    def __init__(self, runner: HeadRunner, maker: TreeMaker, prefix_cache: bool = True) -> None:
        super().__init__(KVCache(runner.num_blocks, runner.block_size, prefix_cache))
        self.vocab_size: int | None = runner.vocab_size
        self.layers = runner.head.layers
        self._runner = runner
        self._maker = maker

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        trees = self._roots([view for view in ticket.views if self._ready(view)])
        growing = trees
        while growing := [tree for tree in growing if self._maker.grows(tree.view, tree.growth)]:
            self._feed_nodes(growing)
            for tree in growing:
                self._maker.add_level(tree.view, tree.growth)
        return {tree.view.rid: self._give(tree) for tree in trees}

    def commit(self, rid: str, tokens: Sequence[int], features: Tensor | None = None) -> None:
        state = self._states.get(rid)
        if state is None or not tokens or features is None:
            return
        if state.drafted:
            self._maker.learn(state.drafted, tokens)
            state.drafted = None
        if not state.begun:
            self.cache.count_reuse(state.table)
        state.pairs += paired([state.tokens[-1], *tokens])
        state.tokens += tokens
        state.waiting.append(features)
        if state.pending >= FED_AT_ONCE:
            if self._grow(state, len(state.pairs)):
                self._feed_pairs([state])
            else:
                self.release(rid)

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        state = self._states.get(rid)
        if state and state.tokens == list(tokens):
            return
        self.release(rid)
        table, pairs = BlockTable(salt=salt), paired(tokens)
        self.cache.attach(table, pairs)
        self._states[rid] = _State(list(tokens[: table.computed + 1]), pairs[: table.computed], table)

    # Drafting ----------------------------------------------------------------------------------------

    def _ready(self, view: DraftView) -> bool:
        """Up to date, and with room for what waits."""
        state = self._states.get(view.rid)
        if state is None or len(state.tokens) != view.length or not state.pairs:
            return False
        return self._grow(state, len(state.pairs))

    def _roots(self, views: Sequence[DraftView]) -> list[_Growing]:
        """The first level of each tree; what does not fit into one pass decodes plainly this round."""
        room, ready, behind = CATCH_UP_TOKENS, [], []
        for view in views:
            state = self._states[view.rid]
            if state.pending <= room:
                room -= state.pending
                ready.append((view, state))
                behind += [state] if state.pending else []
        if behind:
            self._feed_pairs(behind)
        # The nodes lie behind the pairs, and go back when the next pairs are fed.
        fitting = [(v, state) for v, state in ready if self._grow(state, len(state.pairs) + v.nodes)]
        if not fitting:
            return []
        logits = self._runner.logits(torch.stack([state.behind for _, state in fitting]))  # [N, C]
        names = self._runner.head.names
        return [
            _Growing(view, state, self._maker.begin(view, row, names))
            for (view, state), row in zip(fitting, logits, strict=True)
        ]

    def _grow(self, state: _State, slots: int) -> bool:
        """Room for `slots`, if need be from cached prefixes of sequences that wait, the oldest first."""
        idle = (rid for rid, other in list(self._states.items()) if not other.begun)
        while not self.cache.grow(state.table, slots):
            if (rid := next(idle, None)) is None:
                return False
            self.release(rid)
        return True

    def _give(self, tree: _Growing) -> DraftTree:
        given = self._maker.finish(tree.view, tree.growth)
        tree.growth.rows.clear()  # of the size of the vocabulary; nobody will ask for them again
        tree.state.drafted = tree.growth
        return given

    def _feed_pairs(self, states: Sequence[_State]) -> None:
        """One pass over committed pairs without KV."""
        rows = [
            Row(state.tokens[state.table.computed + 1 :], state.table.computed, state.table.blocks, logits=0)
            for state in states
        ]
        features = torch.cat([part for state in states for part in state.waiting])  # [T, F]
        found = self._runner.begin(rows, features).split([state.pending for state in states])
        for state, part in zip(states, found, strict=True):
            state.last, state.waiting = part[-1].clone(), []
            self.cache.commit(state.table, state.pairs, len(state.pairs))

    def _feed_nodes(self, trees: Sequence[_Growing]) -> None:
        """One pass over every node without KV."""
        before = torch.stack([tree.before(node) for tree in trees for node in tree.fresh])  # [T, H]
        found = self._runner.forward([tree.row for tree in trees], before)  # [T, H]
        states, logits = iter(found), iter(self._runner.logits(found))
        for tree in trees:
            tree.states += islice(states, len(tree.fresh))
            tree.growth.take(logits)


def paired(tokens: Sequence[int]) -> list[int]:
    """What the KV of each token but the last stands for: it and the next one, as one number of 63 bits."""
    return [token << 32 | following for token, following in pairwise(tokens)]


def make_drafter(head: Head, making: Making) -> FeatureDrafter:
    """With a KV pool of as many blocks as the target's."""
    maker = TreeMaker(making.config.tree, making.config.draft_sampling)
    return FeatureDrafter(HeadRunner.beside(head, making.target), maker, making.prefix_cache)
