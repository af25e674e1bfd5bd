"""A draft head over a KV pool of its own: what `ModelRunner` is to a model, but fed with hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gammaray.engine.attention import Attention, DenseAttention, paged_attention
from gammaray.engine.batch import Row, pack
from gammaray.engine.pool import KVPool
from gammaray.engine.runner import ModelRunner


class Head(Protocol):
    """H numbers are a hidden state of the head, F those of the target that it begins with."""

    layers: tuple[int, ...]  # of the target, see `Featured`
    names: Tensor | None  # [C], the target's token for each column of its logits; None: all tokens, C = V

    def enter(self, features: Tensor) -> Tensor:
        """The target's features [T, F] as hidden states [T, H]."""

    def forward(self, ids: Tensor, states: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """ids [T], the states [T, H] before them, their positions [T] -> the states [T, H] behind them.

        Attends once, as layer 0.
        """

    def logits(self, states: Tensor) -> Tensor:
        """[N, H] -> [N, C]."""


class HeadRunner:
    """Runs one head. Which block belongs to whom is the caller's business."""

    def __init__(self, head: Head, pool: KVPool, vocab_size: int) -> None:
        self.head = head
        self.vocab_size = vocab_size
        self.num_blocks = pool.num_blocks
        self.block_size = pool.block_size
        self._pool = pool

    @classmethod
    @torch.inference_mode()
    def beside(cls, head: Head, target: ModelRunner) -> HeadRunner:
        """With as many blocks as the target has, of the shape that the head is seen to use."""
        ids = torch.zeros(2, dtype=torch.int64, device=target.device)
        features = target.telling.embed(ids).repeat(1, len(head.layers))  # [2, F]
        probe = DenseAttention()
        states = head.forward(ids, head.enter(features), torch.arange(2, device=target.device), probe)
        pool = KVPool(probe.shapes, target.num_blocks, target.block_size, states.dtype, target.device)
        return cls(head, pool, target.vocab_size)

    @torch.inference_mode()
    def begin(self, rows: Sequence[Row], features: Tensor) -> Tensor:
        """As `forward`, behind the target's features [T, F]."""
        return self.forward(rows, self.head.enter(features))

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row], before: Tensor) -> Tensor:
        """Write the rows' KV and return the states [T, H] behind all tokens fed, from those before them."""
        step = pack(rows, self.block_size).to(self._pool.device)
        attention = paged_attention(self._pool, step.paged)
        return self.head.forward(step.input_ids, before, step.paged.positions, attention)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """[N, H] -> [N, C], of the tokens `head.names`."""
        return self.head.logits(states)
