"""An independent, smaller model as drafter, with KV and a prefix cache of its own.

Trees grow as `tree:` says (tree_maker.py), deterministic by default; with `draft_sampling` its tokens are
drawn from q (growth.py).

With time of its own it drafts ahead, where trees are static: `anticipate` grows the drafts that would follow
the likeliest outcomes of the round that is being verified, as further nodes of the same tree. The next commit
then is a look-up: what stands below the emitted token is the next draft, with its KV, and it was drawn from
the very q that verification will use (math.md section 3b).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from gammaray.drafter_config import Tree
from gammaray.engine import loading
from gammaray.engine.batch import Row
from gammaray.engine.drafters import recurrent
from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.drafters.growth import Branch, Growth, candidates
from gammaray.engine.drafters.outcomes import RANKS, Outcomes, share_budget
from gammaray.engine.drafters.paged import Paged
from gammaray.engine.drafters.recurrent import RecurrentDrafter
from gammaray.engine.drafters.registry import Making
from gammaray.engine.drafters.tree_maker import TreeMaker
from gammaray.engine.kv import BlockTable, KVCache
from gammaray.engine.recording import record_passes
from gammaray.engine.recurrent import is_recurrent
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError, VocabularyMismatch
from gammaray.types import MAX_TREE_NODES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CATCH_UP_TOKENS = 512  # committed tokens fed in a round, by all sequences together
ANTICIPATED_ROWS = 64  # outcomes in a pass, of all sequences together


@dataclass(slots=True)
class _State:
    """One sequence. What grew behind its tokens has KV behind theirs, node by node."""

    tokens: list[int]
    table: BlockTable
    growth: Growth | None = None
    sent: int = 0  # leading nodes that were grown for a draft; 0: what is there was drafted ahead
    view: DraftView | None = None  # of the draft that was given out
    ahead: _Growing | None = None  # what is being drafted ahead; None: not begun


@dataclass(slots=True)
class _Growing:
    """A tree that gets more levels, in one pass with others."""

    state: _State
    view: DraftView
    growth: Growth
    branches: list[Branch]
    guesses: dict[int, list[int]] = field(default_factory=dict)  # what may follow a node, the likeliest first
    outcomes: set[int] = field(default_factory=set)  # nodes below which a draft is made ahead


class ModelDrafter(Paged[_State]):
    """Drafts for all its sequences together, one forward pass a level."""

    def __init__(
        self,
        runner: ModelRunner,
        draft_sampling: bool = False,
        prefix_cache: bool = True,
        tree: Tree = "static",
    ) -> None:
        super().__init__(KVCache(runner.num_blocks, runner.block_size, prefix_cache))
        self.runner = runner
        self.vocab_size: int | None = runner.vocab_size
        self.trees = TreeMaker(tree, draft_sampling)
        self.outcomes = Outcomes()
        self.hits: frozenset[str] = frozenset()

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        ready = {view.rid: view for view in ticket.views if self._ready(view, ticket)}
        growing = [self._hit(view) for view in ready.values() if self._states[view.rid].growth]
        self.hits = frozenset(tree.view.rid for tree in growing)
        logits = self._feed_pending(ready)  # a long catch-up takes several rounds, without a draft
        growing += [self._begin(ready[rid], row) for rid, row in logits.items()]
        while unfinished := [tree for tree in growing if self.trees.grows(tree.view, tree.growth)]:
            self._feed(unfinished)
            for tree in unfinished:
                self.trees.add_level(tree.view, tree.growth)
        return {tree.view.rid: self._give(tree) for tree in growing}

    def anticipate(self, rows: int = ANTICIPATED_ROWS) -> Iterator[None]:
        """Drafts ahead for what `collect` gave out last; each `next` costs one forward pass.

        May be dropped between passes, and must be before any other call. Only for static trees: what is best
        of a dynamic tree is known when all of it stands, and sequoia's next shape may be another one.
        """
        if self.trees.kind != "static":
            return
        out = [state for state in self._states.values() if state.sent]
        fresh = [tree for state in out if not state.ahead and (tree := self._ahead(state, rows, len(out)))]
        if fresh:
            self._feed(fresh)
            yield
            self._add_outcomes(fresh, rows, len(out))
        growing = [state.ahead for state in out if state.ahead]  # of others, what was interrupted
        while growing := [tree for tree in growing if tree.branches]:
            self._feed(growing)
            for tree in growing:
                for branch in tree.branches:
                    self.trees.add_level(tree.view, tree.growth, branch)
                tree.branches = [b for b in tree.branches if b.levels < tree.view.depth]
            yield

    def commit(self, rid: str, tokens: Sequence[int], features: Tensor | None = None) -> None:
        if (state := self._states.get(rid)) is None or not tokens:
            return
        kept, path, growth = self._outcome(state, tokens)
        base = state.table.computed
        moved = [(base + node, base + at) for at, node in enumerate(kept) if node != at]
        if moved:
            self.runner.move(
                self.cache.slots(state.table, (source for source, _ in moved)),
                self.cache.slots(state.table, (target for _, target in moved)),
            )
        state.tokens.extend(tokens)
        self.cache.commit(state.table, state.tokens, base + path, len(kept) - path)
        state.growth, state.sent, state.ahead = growth, 0, None

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        state = self._states.get(rid)
        if state and state.tokens == list(tokens[: len(state.tokens)]):
            self.commit(rid, tokens[len(state.tokens) :])
            return
        self.release(rid)
        state = self._states[rid] = _State(list(tokens), BlockTable(salt=salt))
        self.cache.attach(state.table, state.tokens)
        self.cache.count_reuse(state.table)

    def committed(self, rid: str) -> tuple[list[int], list[int]] | None:
        """Tokens whose KV is committed and the physical slots that hold it, for the state oracle."""
        if (state := self._states.get(rid)) is None:
            return None
        computed = state.table.computed
        return state.tokens[:computed], self.cache.slots(state.table, range(computed))

    # Drafting ----------------------------------------------------------------------------------------

    def _ready(self, view: DraftView, ticket: Ticket) -> bool:
        """Up to date, short enough for this model, and with room for every node."""
        state = self._states.get(view.rid)
        if state is None or len(state.tokens) != view.length:
            return False
        if view.length + view.depth > self.runner.max_model_len:
            return False
        if state.growth is None or state.sent or state.growth.width > view.width:
            # Nothing drafted ahead that fits: the root must be fed again, for its logits.
            state.growth, state.sent, state.ahead = None, 0, None
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
        """One pass over committed tokens without KV; logits [V] by rid where it reached the last one."""
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
        return dict(zip(ends, logits, strict=True))

    def _begin(self, view: DraftView, logits: Tensor) -> _Growing:
        return _Growing(self._states[view.rid], view, self.trees.begin(view, logits), [])

    def _hit(self, view: DraftView) -> _Growing:
        state = self._states[view.rid]
        assert state.growth is not None
        state.growth.cut(view.depth)
        if not state.growth.tokens:
            self.trees.add_level(view, state.growth)
        return _Growing(state, view, state.growth, [])

    def _give(self, tree: _Growing) -> DraftTree:
        state = tree.state
        state.growth, state.view = tree.growth, tree.view
        state.sent, state.ahead = len(tree.growth.tokens), None
        return self.trees.finish(tree.view, tree.growth)

    def _feed(self, growing: Iterable[_Growing]) -> None:
        """One pass over every node without KV."""
        trees = [tree for tree in growing if tree.growth.fed < len(tree.growth.tokens)]
        if not trees:
            return
        rows = [tree.growth.unfed(len(tree.state.tokens), tree.state.table.blocks) for tree in trees]
        logits = iter(self.runner.forward(rows))  # [nodes without KV, V]
        for tree in trees:
            tree.growth.take(logits)

    # Drafting ahead ----------------------------------------------------------------------------------

    def _ahead(self, state: _State, rows: int, sequences: int) -> _Growing | None:
        """The tree of a draft that is out, with room for its outcomes; None where there is none."""
        view, growth = state.view, state.growth
        assert view is not None and growth is not None
        budget = self._budget(view, growth, rows, sequences)
        nodes = len(growth.tokens) + budget * (1 + view.depth * view.width)
        longest = view.length + 2 * view.depth + 1
        if not budget or longest > self.runner.max_model_len:
            return None
        if not self.cache.grow(state.table, view.length + nodes):
            return None
        return _Growing(state, view, growth, [])

    def _budget(self, view: DraftView, growth: Growth, rows: int, sequences: int) -> int:
        return share_budget(rows, sequences, len(growth.tokens), view.depth * view.width, MAX_TREE_NODES)

    def _add_outcomes(self, fresh: Sequence[_Growing], rows: int, sequences: int) -> None:
        chosen = []
        for tree in fresh:
            budget = self._budget(tree.view, tree.growth, rows, sequences)
            chosen.append((tree, self.outcomes.choose(tuple(tree.growth.parents), budget)))
        ends = [(tree, end) for tree, outcomes in chosen for end in dict.fromkeys(n for n, _ in outcomes)]
        guesses = candidates([(tree.growth, end, tree.view) for tree, end in ends], RANKS) if ends else []
        for (tree, end), tokens in zip(ends, guesses, strict=True):
            tree.guesses[end] = tokens
        for tree, outcomes in chosen:
            tree.state.ahead = tree
            for node, rank in outcomes:
                if rank < len(tokens := tree.guesses[node]):
                    root = len(tree.growth.tokens)
                    tree.branches.append(Branch.at(root))
                    tree.outcomes.add(root)
                    tree.growth.add(tokens[rank], node)

    def _outcome(self, state: _State, tokens: Sequence[int]) -> tuple[list[int], int, Growth | None]:
        """Nodes whose KV stays, how many of them are committed, and what was drafted behind all `tokens`."""
        if (growth := state.growth) is None:
            return [], 0, None
        self.trees.learn(growth, tokens)
        path = [node for node in growth.walk(tokens) if node < growth.fed]
        accepted = [node for node in path if node < state.sent]
        if state.ahead and len(accepted) < len(tokens):
            parents = growth.parents[: state.sent]
            self.outcomes.learn(parents, accepted, tokens[len(accepted)], state.ahead.guesses)
        if len(path) < len(tokens) or self.trees.kind != "static":
            return path, len(path), None
        end, below = path[-1], growth.below(path[-1])
        if not (state.ahead and end in state.ahead.outcomes):
            # Of the draft itself, verified in part only. Of a wide tree too few nodes stand there, and of
            # a chain those that were drafted ahead behind another outcome are not of this draft.
            if growth.width > 1:
                return path, len(path), None
            below = [node for node in below if node < state.sent]
        ahead = growth.rerooted(end, below)
        return [*path, *below[: ahead.fed]], len(path), ahead


def make(making: Making) -> ModelDrafter | RecurrentDrafter:
    """Raises VocabularyMismatch, ConfigError."""
    config, target = making.config, making.target
    if is_recurrent(loading.load_config(config.model)):
        drafter = recurrent.load(config, target.device)
        size = drafter.runner.vocab_size
        check_vocabulary(making.name, config.model, size, target.vocab_size, making.tokenizer)
        return drafter
    runner = loading.load_runner(
        config.model,
        dtype=config.dtype,
        block_size=target.block_size,
        num_blocks=target.num_blocks,
        device=target.device,
    )
    check_vocabulary(making.name, config.model, runner.vocab_size, target.vocab_size, making.tokenizer)
    record_passes(runner, making.max_batch, CATCH_UP_TOKENS)
    return ModelDrafter(runner, config.draft_sampling, making.prefix_cache, config.tree)


def check_vocabulary(
    name: str, model: str, size: int, target_size: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Token i must mean the same to drafter and target. Sizes are compared first, then the entries."""
    if size != target_size:
        raise VocabularyMismatch(target_size, size, name)
    if loading.load_tokenizer(model).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"drafter {name!r} ({model}) has a vocabulary of the target's size, {size}, but "
            "with other tokens in it: use a drafter made for this target's tokenizer"
        )
