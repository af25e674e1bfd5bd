"""An independent, smaller model as drafter, with KV and a prefix cache of its own.

Deterministic trees by default: of each level the `width` nodes of highest cumulative log-probability
stay (the expansion of EAGLE-2, arXiv 2406.16858, under a budget of depth x width nodes). With
`draft_sampling` the root gets `width` children drawn from q and every later node one: a shape that does
not depend on what was drawn, as exactness asks (math.md section 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gammaray.engine.batch import Row
from gammaray.engine.drafters.base import DraftTree, DraftView, Drawn, Ticket
from gammaray.engine.kv import BlockTable, KVCache
from gammaray.engine.logits import draw_children, process
from gammaray.engine.runner import ModelRunner

CATCH_UP_TOKENS = 512  # committed tokens fed in a round, by all sequences together


@dataclass(slots=True)
class _State:
    """One sequence. The first `fed` nodes of `draft` have KV behind that of the committed tokens."""

    tokens: list[int]
    table: BlockTable
    draft: DraftTree | None = None
    fed: int = 0


@dataclass(slots=True)
class _Growth:
    """A tree while it grows, level by level."""

    view: DraftView
    sampled: bool
    levels: int = 0
    frontier: range = range(-1, 0)  # nodes of the newest level; at first the root alone
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # cumulative log-probability
    q: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # ids and probabilities, [S] each

    def add(self, nodes: Sequence[tuple[int, int, float]]) -> None:
        """One level of (token, parent, score)."""
        self.frontier = range(len(self.tokens), len(self.tokens) + len(nodes))
        self.levels += 1
        for token, parent, score in nodes:
            self.tokens.append(token)
            self.parents.append(parent)
            self.scores.append(score)

    def tree(self) -> DraftTree:
        drawn: Drawn = "deterministic"
        if self.sampled:
            drawn = "without_replacement" if self.view.width > 1 else "iid"
        return DraftTree(
            tokens=tuple(self.tokens),
            parents=tuple(self.parents),
            drawn=drawn,
            q_ids=torch.stack([ids for ids, _ in self.q]) if self.sampled else None,  # [K, S]
            q_probs=torch.stack([probs for _, probs in self.q]) if self.sampled else None,  # [K, S]
        )


class ModelDrafter:
    """Drafts for all its sequences together, one forward pass a level."""

    def __init__(self, runner: ModelRunner, draft_sampling: bool = False, prefix_cache: bool = True) -> None:
        self.runner = runner
        self.vocab_size: int | None = runner.vocab_size
        self.draft_sampling = draft_sampling
        self.cache = KVCache(runner.num_blocks, runner.block_size, prefix_cache)
        self._states: dict[str, _State] = {}

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views))

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        ready = {view.rid: view for view in ticket.views if self._ready(view, ticket)}
        logits = self._feed_pending(ready)  # a long catch-up takes several rounds, without a draft
        growing = [
            _Growth(ready[rid], self.draft_sampling and not ready[rid].sampling.greedy) for rid in logits
        ]
        for growth in growing:
            self._add_level(growth, logits[growth.view.rid])
        while unfinished := [g for g in growing if g.levels < g.view.depth]:
            self._deepen(unfinished)
        for growth in growing:
            state = self._states[growth.view.rid]
            state.draft, state.fed = growth.tree(), growth.frontier.start
        return {g.view.rid: tree for g in growing if (tree := self._states[g.view.rid].draft)}

    def commit(self, rid: str, tokens: Sequence[int], features: Tensor | None = None) -> None:
        if (state := self._states.get(rid)) is None:
            return
        path = _accepted(state.draft, state.fed, tokens) if state.draft else []
        base = state.table.computed
        moved = [(node, at) for at, node in enumerate(path) if node != at]
        if moved:
            self.runner.move(
                self.cache.slots(state.table, (base + node for node, _ in moved)),
                self.cache.slots(state.table, (base + at for _, at in moved)),
            )
        state.tokens.extend(tokens)
        state.draft, state.fed = None, 0
        self.cache.commit(state.table, state.tokens, base + len(path))

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        state = self._states.get(rid)
        if state and state.tokens == list(tokens[: len(state.tokens)]):
            self.commit(rid, tokens[len(state.tokens) :])
            return
        self.release(rid)
        state = self._states[rid] = _State(list(tokens), BlockTable(salt=salt))
        self.cache.attach(state.table, state.tokens)

    def release(self, rid: str) -> None:
        if state := self._states.pop(rid, None):
            self.cache.free(state.table)

    def length(self, rid: str) -> int | None:
        state = self._states.get(rid)
        return len(state.tokens) if state else None

    def committed(self, rid: str) -> tuple[list[int], list[int]] | None:
        """Tokens whose KV is committed and the physical slots that hold it, for the state oracle."""
        if (state := self._states.get(rid)) is None:
            return None
        computed = state.table.computed
        return state.tokens[:computed], self.cache.slots(state.table, range(computed))

    def _ready(self, view: DraftView, ticket: Ticket) -> bool:
        """Up to date, short enough for this model, and with room for every node."""
        state = self._states.get(view.rid)
        if state is None or len(state.tokens) != view.length:
            return False
        if view.length + view.depth > self.runner.max_model_len:
            return False
        # A draft that was never committed: its root must be fed again, for its logits.
        state.draft, state.fed = None, 0
        state.table.computed = min(state.table.computed, view.length - 1)
        return self._grow(state, view.length + view.depth * view.width, ticket)

    def _grow(self, state: _State, slots: int, ticket: Ticket) -> bool:
        """Room for `slots`, if need be from sequences that do not draft this round, the oldest first."""
        drafting = {view.rid for view in ticket.views}
        idle = (rid for rid in list(self._states) if rid not in drafting)
        while not self.cache.grow(state.table, slots):
            if (rid := next(idle, None)) is None:
                return False
            self.release(rid)
        return True

    def _feed_pending(self, ready: Mapping[str, DraftView]) -> dict[str, Tensor]:
        """One pass over committed tokens without KV; logits [1, V] by rid where it reached the last one."""
        room = CATCH_UP_TOKENS
        rows, fed, ends = [], [], []
        for rid in ready:
            state = self._states[rid]
            start = state.table.computed
            chunk = state.tokens[start : start + room]
            if not chunk:
                continue
            room -= len(chunk)
            end = start + len(chunk) == len(state.tokens)
            ends += [rid] if end else []
            rows.append(Row(pending=chunk, start=start, blocks=state.table.blocks, logits=end))
            fed.append((state, len(chunk)))
        if not rows:
            return {}
        logits = self.runner.forward(rows)  # [ends, V]
        for state, count in fed:  # only now: a pass that fails has computed nothing
            state.table.computed += count
        return {rid: logits[i : i + 1] for i, rid in enumerate(ends)}

    def _deepen(self, growing: Sequence[_Growth]) -> None:
        """Feed the newest level of every tree in one pass and add the next level."""
        rows = []
        for growth in growing:
            state = self._states[growth.view.rid]
            rows.append(
                Row(
                    pending=(),
                    start=len(state.tokens),
                    blocks=state.table.blocks,
                    tree_tokens=growth.tokens,
                    tree_parents=growth.parents,
                    fed=growth.frontier.start,
                )
            )
        logits = self.runner.forward(rows)  # [sum of frontiers, V]
        for growth, level in zip(growing, logits.split([len(g.frontier) for g in growing]), strict=True):
            self._add_level(growth, level)

    def _add_level(self, growth: _Growth, logits: Tensor) -> None:
        """`logits` [F, V]: one row for each frontier node."""
        if growth.sampled:
            _sample_level(growth, logits)
        else:
            _best_level(growth, logits)


def _best_level(growth: _Growth, logits: Tensor) -> None:
    width = min(growth.view.width, logits.shape[-1])
    values, ids = logits.log_softmax(-1).topk(width)  # [F, W]
    candidates = [
        (token, parent, (growth.scores[parent] if parent >= 0 else 0.0) + value)
        for parent, row, scores in zip(growth.frontier, ids.tolist(), values.tolist(), strict=True)
        for token, value in zip(row, scores, strict=True)
    ]
    growth.add(sorted(candidates, key=lambda node: -node[2])[:width])


def _sample_level(growth: _Growth, logits: Tensor) -> None:
    view, count = growth.view, len(growth.frontier)
    width = view.width if growth.levels == 0 else 1
    log_q = process(logits, [view.sampling] * count)  # [F, V]
    drawn = draw_children(
        log_q,
        [view.sampling] * count,
        sequences=[view.sequence] * count,
        positions=[view.length + growth.levels] * count,
        width=width,
        drawn="without_replacement" if view.width > 1 else "iid",
        coupled=view.coupled,
        branches=range(count),
    )
    tokens, q_ids, q_probs = drawn  # [F, w], [F, S], [F, S]
    nodes = []
    for row, parent in enumerate(growth.frontier):
        for token in tokens[row].tolist():
            nodes.append((token, parent, 0.0))
            growth.q.append((q_ids[row], q_probs[row]))
    growth.add(nodes)


def _accepted(draft: DraftTree, fed: int, tokens: Sequence[int]) -> list[int]:
    """The nodes, among the first `fed`, that spell the beginning of `tokens`."""
    path: list[int] = []
    for token in tokens:
        parent = path[-1] if path else -1
        found = (n for n in range(fed) if draft.parents[n] == parent and draft.tokens[n] == token)
        if (node := next(found, None)) is None:
            break
        path.append(node)
    return path
