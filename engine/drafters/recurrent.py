"""A recurrent model as drafter, with a state per drafted token in place of KV (`method: model`).

A state cannot be cut back to what was accepted. So the state behind every node of a draft is kept until the
commit, which takes the one behind the last accepted node and drops the others; what no node stands for is fed
again. A node goes on from its parent's state, so a tree costs one pass a level, as a chain does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gammaray.drafter_config import ModelDrafter as ModelDrafterConfig
from gammaray.engine import loading
from gammaray.engine.device import resolve_device, resolve_dtype
from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.drafters.growth import Growth
from gammaray.engine.drafters.tree_maker import TreeMaker
from gammaray.engine.recurrent import RecurrentRunner

CATCH_UP_TOKENS = 512  # fed in a round in passes over many tokens, by all sequences together
CATCH_UP_STEPS = 32  # passes in a round that feed one token of each sequence
FEW = 4  # tokens that are as well fed one by one, beside those of other sequences


@dataclass(slots=True)
class _State:
    """One sequence. `kept` is behind the first `fed` tokens, and so are the `logits`."""

    tokens: list[int]
    fed: int = 0
    kept: Tensor | None = None  # [F]
    logits: Tensor | None = None  # [V]
    growth: Growth | None = None  # of the draft that is out
    nodes: list[Tensor] = field(default_factory=list)  # [F], behind each node of it that was fed

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.fed :]

    def move(self, kept: Tensor, logits: Tensor, count: int) -> None:
        """Copies, as what is given are rows of a whole batch, which need not stay."""
        self.kept, self.logits, self.fed = kept.clone(), logits.clone(), self.fed + count


class RecurrentDrafter:
    """Drafts for all its sequences together, one forward pass a level."""

    def __init__(self, runner: RecurrentRunner, maker: TreeMaker) -> None:
        self.runner = runner
        self.vocab_size: int | None = runner.vocab_size
        self._maker = maker
        self._states: dict[str, _State] = {}

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views))

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        views = [view for view in ticket.views if self.length(view.rid) == view.length]
        self._feed_pending([self._states[view.rid] for view in views])
        growing = []
        for view in views:
            state = self._states[view.rid]
            if state.logits is not None and not state.pending:  # else a long catch-up takes several rounds
                state.growth, state.nodes = self._maker.begin(view, state.logits), []
                growing.append((view, state, state.growth))
        drafted = list(growing)
        while growing := [entry for entry in growing if self._maker.grows(entry[0], entry[2])]:
            self._feed_nodes([(state, growth) for _, state, growth in growing])
            for view, _, growth in growing:
                self._maker.add_level(view, growth)
        return {view.rid: self._maker.finish(view, growth) for view, _, growth in drafted}

    def commit(self, rid: str, tokens: Sequence[int], features: Tensor | None = None) -> None:
        if (state := self._states.get(rid)) is None or not tokens:
            return
        if (growth := state.growth) is not None:
            self._maker.learn(growth, tokens)
            if path := [node for node in growth.walk(tokens) if node < growth.fed]:
                state.move(state.nodes[path[-1]], growth.rows[path[-1]], len(path))
        state.tokens.extend(tokens)
        state.growth, state.nodes = None, []

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        state = self._states.get(rid)
        if state and state.tokens == list(tokens[: len(state.tokens)]):
            self.commit(rid, tokens[len(state.tokens) :])
        else:
            self._states[rid] = _State(list(tokens))

    def release(self, rid: str) -> None:
        self._states.pop(rid, None)

    def length(self, rid: str) -> int | None:
        state = self._states.get(rid)
        return len(state.tokens) if state else None

    def committed(self, rid: str) -> tuple[list[int], Tensor] | None:
        """Tokens that are fed, and the state [F] behind them."""
        state = self._states.get(rid)
        return None if state is None or state.kept is None else (state.tokens[: state.fed], state.kept)

    def _feed_pending(self, states: Sequence[_State]) -> None:
        """Committed tokens that no state stands for, as far as this round's share goes."""
        room = CATCH_UP_TOKENS
        for state in states:
            fresh = state.kept is None
            if room and (fresh or (self.runner.continues and len(state.pending) > FEW)):
                piece = state.pending[:room]
                logits, kept = self.runner.forward([piece], None if fresh else [_of(state)])
                state.move(kept[0], logits[0], len(piece))
                room -= len(piece)
        begun = [state for state in states if state.kept is not None]
        for _ in range(CATCH_UP_STEPS):
            if not (behind := [state for state in begun if state.pending]):
                return
            tokens = [state.pending[:1] for state in behind]
            rows = zip(behind, *self.runner.forward(tokens, [_of(state) for state in behind]), strict=True)
            for state, logits, kept in rows:
                state.move(kept, logits, 1)

    def _feed_nodes(self, growing: Sequence[tuple[_State, Growth]]) -> None:
        """One pass over every node without a state."""
        new = [
            (state, growth, node)
            for state, growth in growing
            for node in range(growth.fed, len(growth.tokens))
        ]
        parents = [growth.parents[node] for _, growth, node in new]
        above = [
            state.nodes[parent] if parent >= 0 else _of(state)
            for (state, _, _), parent in zip(new, parents, strict=True)
        ]
        rows = self.runner.forward([[growth.tokens[node]] for _, growth, node in new], above)
        for (state, growth, _), logits, kept in zip(new, *rows, strict=True):
            growth.rows.append(logits)
            state.nodes.append(kept)


def load(config: ModelDrafterConfig, device: str | torch.device = "auto") -> RecurrentDrafter:
    """Raises ConfigError, ModelUnsupported."""
    place = resolve_device(device)
    model = loading.load_model(config.model, resolve_dtype(config.dtype, place), place)
    return RecurrentDrafter(RecurrentRunner(model), TreeMaker(config.tree, config.draft_sampling))


def _of(state: _State) -> Tensor:
    assert state.kept is not None
    return state.kept
