"""A block of tokens in one pass, a Markov head between them and a confidence head (DSpark, arXiv 2607.05147).

The backbone (block_model.py) tells the states of every place of a block; the tokens then come one after
another (block_draft.py). Deterministic drafts are chains, or trees of the best tokens by cumulative
log-probability. With `draft_sampling` tokens are drawn from q.

Context KV depends on no token behind its own position, so the prefix cache's keys are plain prefixes: none
includes a next token. Reads the layouts of DeepSpec and speculators (block_config.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gammaray.engine.batch import transfer
from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.drafters.block_config import parse
from gammaray.engine.drafters.block_draft import BlockDraft, Heads
from gammaray.engine.drafters.block_model import Block, BlockModel
from gammaray.engine.drafters.head_loading import folder_of, read_config, read_tensors
from gammaray.engine.drafters.markov import (
    HeadSizes,
    take_confidence,
    take_markov,
)
from gammaray.engine.drafters.paged import Paged
from gammaray.engine.drafters.registry import Making
from gammaray.engine.drafters.tree_maker import TreeMaker
from gammaray.engine.drafters.weights import Weights
from gammaray.engine.kv import BlockTable, KVCache
from gammaray.engine.pool import KVPool
from gammaray.errors import ConfigError, VocabularyMismatch

WAITING_TOKENS = 256  # of one sequence whose hidden states may wait for the next draft
UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")  # of training


@dataclass(slots=True)
class _State:
    """One sequence. Behind its tokens, save the last, the target's hidden states are KV, or wait for it."""

    tokens: list[int]
    table: BlockTable
    waiting: list[Tensor] = field(default_factory=list)  # [n, F] each
    begun: bool = False  # the target has told something of it; until then it waits for a place there


class DsparkDrafter(Paged[_State]):
    """Drafts for all its sequences together: one pass over their new context, one over their blocks."""

    def __init__(
        self,
        model: BlockModel,
        heads: Heads,
        pool: KVPool,
        draft_sampling: bool = False,
        prefix_cache: bool = True,
    ) -> None:
        super().__init__(KVCache(pool.num_blocks, pool.block_size, prefix_cache))
        self.layers = model.config.layers
        self.vocab_size: int | None = model.config.backbone.vocab_size
        self.drafted = model.config.drafted  # tokens at most
        self._model = model
        self._pool = pool
        self._max_model_len = model.config.backbone.max_position_embeddings
        self._heads = heads
        self._maker = TreeMaker("static", draft_sampling)

    @torch.inference_mode()
    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        fresh = [view for view in ticket.views if self._is_fresh(view)]
        self._add_context(self._states[view.rid] for view in fresh)
        drafts = self._run_blocks([view for view in fresh if self._has_room(view)])
        if drafts:
            self._heads.grow(drafts, self._maker)
        return {draft.view.rid: self._heads.finish(draft, self._maker) for draft in drafts}

    def commit(self, rid: str, tokens: Sequence[int], features: Tensor | None = None) -> None:
        if (state := self._states.get(rid)) is None or features is None:
            return
        if not state.begun:
            self.cache.count_reuse(state.table)
            state.begun = True
        state.tokens.extend(tokens)
        state.waiting.append(features)
        if sum(map(len, state.waiting)) >= WAITING_TOKENS:
            self._add_context([state])

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        self.release(rid)
        table = BlockTable(salt=salt)
        self.cache.attach(table, tokens)
        self._states[rid] = _State(list(tokens[: table.computed + 1]), table)

    # Context -----------------------------------------------------------------------------------------

    def _is_fresh(self, view: DraftView) -> bool:
        state = self._states.get(view.rid)
        longest = view.length - 1 + self._model.config.block_size
        return state is not None and len(state.tokens) == view.length > 1 and longest <= self._max_model_len

    @torch.inference_mode()
    def _add_context(self, states: Iterable[_State]) -> None:
        """One pass over what waits. Without room it goes on waiting."""
        ready = [
            state for state in states if state.waiting and self.cache.grow(state.table, len(state.tokens))
        ]
        if not ready:
            return
        places = [range(state.table.computed, len(state.tokens) - 1) for state in ready]
        pairs = list(zip(ready, places, strict=True))
        slots = [slot for state, own in pairs for slot in self.cache.slots(state.table, own)]
        positions = [place for own in places for place in own]
        where = transfer(torch.tensor([positions, slots]), self._pool.device)  # [2, T]
        features = torch.cat([part for state in ready for part in state.waiting])  # [T, F]
        self._model.add_context(self._pool, features, *where)
        for state in ready:
            state.waiting.clear()
            self.cache.commit(state.table, state.tokens, len(state.tokens) - 1)

    def _has_room(self, view: DraftView) -> bool:
        state = self._states[view.rid]
        return not state.waiting and self.cache.grow(state.table, self._end(view))

    def _end(self, view: DraftView) -> int:
        """The slot behind a block, which begins in that of the last committed token."""
        return view.length - 1 + self._model.config.block_size

    # Blocks ------------------------------------------------------------------------------------------

    def _run_blocks(self, views: Sequence[DraftView]) -> list[BlockDraft]:
        if not views:
            return []
        states, config = [self._states[view.rid] for view in views], self._model.config
        blocks = [
            Block(
                anchor=state.tokens[-1],
                start=view.length - 1,
                slots=self.cache.slots(state.table, range(view.length - 1, self._end(view))),
                blocks=state.table.blocks,
            )
            for view, state in zip(views, states, strict=True)
        ]
        hidden = self._model.run(self._pool, blocks)[:, config.block_size - config.drafted :]  # [N, D, H]
        base = self._model.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])  # [N, D, Vd]
        return [
            BlockDraft(
                replace(view, depth=min(view.depth, config.drafted)), state.tokens[-1], hidden[row], base[row]
            )
            for row, (view, state) in enumerate(zip(views, states, strict=True))
        ]


def make(making: Making) -> DsparkDrafter:
    """Raises ConfigError, VocabularyMismatch."""
    target, path = making.target, making.config.path
    folder = folder_of(path)
    config = parse(read_config(folder), path)
    own = config.backbone
    if own.vocab_size != target.vocab_size:
        raise VocabularyMismatch(target.vocab_size, own.vocab_size, path)
    if max(config.layers) > target.num_layers:
        raise ConfigError(
            f"{path}: reads layers {list(config.layers)}, and the target has {target.num_layers}"
        )
    weights = Weights(path, read_tensors(folder), target.dtype, target.device)
    hidden = target.telling.embed(torch.zeros(1, dtype=torch.int64, device=target.device)).shape[-1]
    model = BlockModel(config, weights, target.telling, hidden)
    sizes = HeadSizes(own.vocab_size, config.draft_vocab, hidden, config.rank)
    markov = take_markov(weights, config.markov, sizes)
    confidence = None
    if config.confident:
        confidence = take_confidence(weights, config.confidence_embeds, sizes, config.temperatures)
    weights.finish(UNUSED)
    blocks = target.num_blocks + making.max_batch * -(-config.block_size // target.block_size)
    return DsparkDrafter(
        model,
        Heads(model, markov, confidence),
        KVPool(model.shapes, blocks, target.block_size, target.dtype, target.device),
        making.config.draft_sampling,
        making.prefix_cache,
    )
