"""The first layers of the target as its drafter, over the target's own pages (LayerSkip, arXiv 2404.16710).

It has no KV: what is committed is in the target's pages already, and the first layers of the verification
write the very values that the draft wrote. The last committed token has none there yet, so it is fed first;
node i of a draft lies in slot length + i, which the target has claimed for it.

The target's norm and head end the pass, or those of a checkpoint that was trained to exit there. Such a
checkpoint may share the pages only if it would have written the same (`engine/layout.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gammaray.drafter_config import LayerExitDrafter as LayerExitConfig
from gammaray.engine import loading
from gammaray.engine.batch import Row
from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.drafters.growth import Growth
from gammaray.engine.drafters.registry import Making
from gammaray.engine.drafters.tree_maker import TreeMaker
from gammaray.engine.layout import check_sharing, layout
from gammaray.engine.recording import record_passes
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ModelUnsupported, VocabularyMismatch

TRIAL_TOKENS = 8
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the largest key or value


@dataclass(slots=True)
class _State:
    """All that a sequence is to it: how many tokens, and the last one."""

    length: int
    last: int
    growth: Growth | None = None  # of the draft that is out


@dataclass(frozen=True, slots=True)
class KVUse:
    """Bytes of the tensors that KV is in."""

    own: int  # that no other runner's pages are in
    as_model: int  # that a model of the same layers with as many blocks has (`method: model`)

    @property
    def saved(self) -> int:
        return self.as_model - self.own


class LayerExitDrafter:
    """Drafts for all its sequences together, one pass of the first layers a level."""

    def __init__(self, runner: ModelRunner, maker: TreeMaker) -> None:
        """`runner`: see `ModelRunner.first`."""
        self.runner = runner
        self.vocab_size: int | None = runner.vocab_size
        self._maker = maker
        self._states: dict[str, _State] = {}

    def kv_use(self, target: ModelRunner) -> KVUse:
        """What sharing the pages of `target` saves."""
        return KVUse(self.runner.kv_bytes_beside(target), self.runner.kv_bytes)

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views))

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        views = [view for view in ticket.views if self._ready(view)]
        if not views:
            return {}
        logits = self.runner.forward([self._root(view) for view in views])  # [R, V]
        growths = [self._maker.begin(view, row) for view, row in zip(views, logits, strict=True)]
        pairs = list(zip(views, growths, strict=True))
        while growing := [(view, growth) for view, growth in pairs if self._maker.grows(view, growth)]:
            self._feed(growing)
            for view, growth in growing:
                self._maker.add_level(view, growth)
        for view, growth in pairs:
            self._states[view.rid].growth = growth
        return {view.rid: self._maker.finish(view, growth) for view, growth in pairs}

    def commit(self, rid: str, tokens: Sequence[int], features: Tensor | None = None) -> None:
        if (state := self._states.get(rid)) is None or not tokens:
            return
        if state.growth is not None:
            self._maker.learn(state.growth, tokens)
        self._states[rid] = _State(state.length + len(tokens), tokens[-1])

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        self._states[rid] = _State(len(tokens), tokens[-1])

    def release(self, rid: str) -> None:
        self._states.pop(rid, None)

    def length(self, rid: str) -> int | None:
        state = self._states.get(rid)
        return state.length if state else None

    def _ready(self, view: DraftView) -> bool:
        """Up to date, and with a slot of the target's for every node."""
        slots = view.length + view.nodes
        return (
            self.length(view.rid) == view.length
            and slots <= len(view.blocks) * self.runner.block_size
            and view.length + view.depth <= self.runner.max_model_len
        )

    def _root(self, view: DraftView) -> Row:
        return Row([self._states[view.rid].last], view.length - 1, view.blocks)

    def _feed(self, growing: Sequence[tuple[DraftView, Growth]]) -> None:
        """One pass over the newest level of each."""
        rows = [growth.unfed(view.length, view.blocks) for view, growth in growing]
        logits = iter(self.runner.forward(rows))  # [nodes of the newest levels, V]
        for _, growth in growing:
            growth.take(logits)


def make(making: Making) -> LayerExitDrafter:
    """Raises ConfigError, ModelUnsupported, VocabularyMismatch."""
    config: LayerExitConfig = making.config
    target = making.target
    target.first(config.layers)  # refuses before a checkpoint is read
    runner = target.first(config.layers, _own_end(making, config.path) if config.path else None)
    check_pages(runner, target)
    record_passes(runner, making.max_batch, making.max_batch)
    cost = runner.num_layers / target.num_layers
    return LayerExitDrafter(runner, TreeMaker(config.tree, config.draft_sampling, level_cost=cost))


def _own_end(making: Making, path: str) -> PreTrainedModel:
    """The checkpoint whose norm and head are used. Refuses one that would have written other pages."""
    layers, dtype = making.config.layers, making.target.dtype
    end = loading.load_first(path, layers, dtype, making.target.device)
    size = end.config.get_text_config().vocab_size
    if size != making.target.vocab_size:
        raise VocabularyMismatch(making.target.vocab_size, size, making.name)
    check_sharing(making.name, layout(end), layout(loading.load_first(making.model, layers, dtype)))
    return end


def check_pages(runner: ModelRunner, target: ModelRunner) -> None:
    """Raises ModelUnsupported unless the first layers alone write what the whole target writes there."""
    tokens = [i % target.vocab_size for i in range(TRIAL_TOKENS)]
    (_, own), (_, whole) = runner.dense(tokens), target.dense(tokens)
    for layer, (mine, theirs) in enumerate(zip(own, whole, strict=False)):
        for one, other in zip(mine, theirs, strict=True):
            scale = other.float().abs().max().clamp(min=1.0)
            if not bool(((one.float() - other.float()).abs() <= TOLERANCE[target.dtype] * scale).all()):
                raise ModelUnsupported(
                    f"ended after {runner.num_layers} layers, the target writes other KV in layer {layer}: "
                    "use method: model"
                )
