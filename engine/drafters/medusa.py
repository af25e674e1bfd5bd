"""Heads on the target's last hidden state, each for one token further ahead (Medusa, arXiv 2401.10774).

Head k reads the state whose logits gave the last committed token and proposes the token k + 1 places behind
that one (section 2.1.1): residual blocks x + SiLU(W x + b), then a projection to the vocabulary. It knows
nothing of the tokens between, so a path's score is the sum of what the heads say of each place.

Reads checkpoints as the paper's authors publish them: `config.json` with `medusa_num_heads` and
`medusa_num_layers`, and tensors `{k}.{j}.linear.weight`, `{k}.{j}.linear.bias` of block j of head k and
`{k}.{layers}.weight` of its projection, also behind `medusa_head.` or `medusa_heads.`. Some name fewer heads
in `config.json` than they have; all are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import exp
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.drafters.head_loading import folder_of, read_config, read_tensors
from gammaray.engine.drafters.registry import Making
from gammaray.engine.drafters.weights import Weights
from gammaray.engine.lean import Linear
from gammaray.engine.linear import pack_linear
from gammaray.errors import ConfigError

PREFIXES = ("medusa_heads.", "medusa_head.")


@dataclass(frozen=True, slots=True)
class Head:
    """Predicts one place."""

    blocks: tuple[Linear, ...]
    vocabulary: Linear

    def __call__(self, states: Tensor) -> Tensor:
        """Hidden states [N, H] to logits [N, V]."""
        for block in self.blocks:
            states = states + F.silu(block(states))
        return self.vocabulary(states)


@dataclass(slots=True)
class _State:
    length: int  # committed tokens
    feature: Tensor | None = None  # [H] behind the last but one of them; None: not seen yet


class MedusaDrafter:
    """Has no state but the last hidden state of each sequence, so the target may reuse all of its cache."""

    def __init__(self, heads: Sequence[Head], layer: int, vocab_size: int) -> None:
        """`layer`: what the target's own head reads, as `ModelRunner.forward_features` counts."""
        self.layers = (layer,)
        self.vocab_size: int | None = vocab_size
        self._heads = tuple(heads)
        self._states: dict[str, _State] = {}

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views))

    @torch.inference_mode()
    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        ready = [(view, state) for view in ticket.views if (state := self._last_state(view)) is not None]
        if not ready:
            return {}
        states = torch.stack([state for _, state in ready])  # [N, H]
        heads = self._heads[: max(view.depth for view, _ in ready)]
        logits = torch.stack([head(states) for head in heads], 1)  # [N, K, V]
        most = min(max(view.nodes for view, _ in ready), logits.shape[-1])
        scores, tokens = logits.float().log_softmax(-1).topk(most)  # [N, K, C]
        rows = zip(ready, tokens.tolist(), scores.tolist(), strict=True)
        return {view.rid: best_tree(ids, values, view) for (view, _), ids, values in rows}

    def commit(self, rid: str, tokens: Sequence[int], features: Tensor | None = None) -> None:
        if state := self._states.get(rid):
            state.length += len(tokens)
            state.feature = None if features is None else features[-1].clone()  # not a view of them all

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        self._states[rid] = _State(len(tokens))  # the next commit brings the feature

    def release(self, rid: str) -> None:
        self._states.pop(rid, None)

    def length(self, rid: str) -> int | None:
        state = self._states.get(rid)
        return state.length if state else None

    def _last_state(self, view: DraftView) -> Tensor | None:
        """[H]; None where the sequence is at another length or was not seen yet."""
        state = self._states.get(view.rid)
        return state.feature if state and state.length == view.length else None


def best_tree(
    tokens: Sequence[Sequence[int]], scores: Sequence[Sequence[float]], view: DraftView
) -> DraftTree:
    """The `view.nodes` nodes of highest cumulative log-probability, at most `view.depth` levels of them; a
    chain where the width is 1. Deterministic.

    `tokens` and `scores` [K][C]: what each head finds likeliest, in descending order, and its
    log-probability. A node's parent and its better siblings have scores that are no lower, so a best-first
    search finds the best set, parents first.
    """
    nodes: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    levels = min(view.depth, len(tokens))
    waiting = [(-scores[0][0], 0, 0, -1, 0.0)]  # negative score, level, rank, parent, the parent's score
    while waiting and len(nodes) < view.nodes:
        cost, level, rank, parent, above = heappop(waiting)
        node = len(nodes)
        nodes.append(tokens[level][rank])
        parents.append(parent)
        confidence.append(exp(scores[level][rank]))
        if level + 1 < levels:
            heappush(waiting, (cost - scores[level + 1][0], level + 1, 0, node, -cost))
        if view.width > 1 and rank + 1 < len(tokens[level]):
            heappush(waiting, (-above - scores[level][rank + 1], level, rank + 1, parent, above))
    return DraftTree(tuple(nodes), tuple(parents), confidence=tuple(confidence))


def make(making: Making) -> MedusaDrafter:
    """Raises ConfigError."""
    target, path = making.target, making.config.path
    hidden = target.telling.embed(torch.zeros(1, dtype=torch.int64, device=target.device)).shape[-1]
    config = read_config(folder := folder_of(path))
    count, layers = _counted(config, "medusa_num_heads", path), _counted(config, "medusa_num_layers", path)
    named = {_plain(name): tensor for name, tensor in read_tensors(folder).items()}
    while f"{count}.{layers}.weight" in named:
        count += 1
    weights = Weights(path, named, target.dtype, target.device)
    heads = [_head(weights, index, layers, hidden, target.vocab_size) for index in range(count)]
    weights.finish()
    return MedusaDrafter(heads, target.num_layers + 1, target.vocab_size)


def _head(weights: Weights, index: int, layers: int, hidden: int, vocab_size: int) -> Head:
    blocks = []
    for layer in range(layers):
        name = f"{index}.{layer}.linear"
        weight, bias = weights.take(f"{name}.weight", hidden, hidden), weights.find(f"{name}.bias", hidden)
        blocks.append(pack_linear(weight, bias).forward)
    vocabulary = weights.take(f"{index}.{layers}.weight", vocab_size, hidden)
    return Head(tuple(blocks), pack_linear(vocabulary).forward)


def _counted(config: Mapping[str, Any], key: str, path: str) -> int:
    if type(count := config.get(key)) is not int or count < 1:
        raise ConfigError(f"{path}: config.json needs {key}, a positive number (it has {count!r})")
    return count


def _plain(name: str) -> str:
    return next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)
