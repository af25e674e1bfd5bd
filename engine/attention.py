"""What a model calls to attend: over pages while serving, over one whole sequence as the truth.

A model knows nothing of pages. Each layer hands its queries, keys and values to an `Attention`, which
stores the keys and answers; the same weights thus serve packed ragged batches and the state oracle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gammaray.engine.pool import KVPool, KVShape
from gammaray.kernels.api import AttentionPlan, PagedBatch, paged_tree_attention, plan_attention, write_kv
from gammaray.kernels.backend import backend
from gammaray.kernels.paths import AttentionSizes


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer's scores become weights; see `gammaray.kernels.api.paged_tree_attention`."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]


class Attention(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv] of one layer -> [T, H, Dv]."""


class RotatingAttention(ABC):
    """Attention that also turns queries and keys, in the pass that stores the keys. No protocol: each layer
    asks for it in each pass, and `isinstance` of a protocol takes 10 us to say no."""

    @abstractmethod
    def attend_unrotated(
        self, layer: int, qk: Tensor, v: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions
    ) -> Tensor:
        """qk [T, H + Hkv, D], v [T, Hkv, D], cos and signed sin [T, 1, D] (see `lean.py`) -> [T, H, D]."""


class Model(Protocol):
    """A causal language model whose attention is handed in."""

    @property
    def embeddings(self) -> Tensor:
        """Of the input, [V, H]."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Attention, wanted: Tensor | None
    ) -> Tensor:
        """input_ids [T], positions [T], wanted [N] token indices (None: all) -> logits [N, V]."""


@runtime_checkable
class LayeredModel(Model, Protocol):
    """A model that can also end early."""

    def first(self, layers: int, end: PreTrainedModel | None = None) -> Model:
        """Its first `layers` layers, behind them its final norm and its head, or those of `end`, which is
        taken over. All weights are shared, and so are the numbers of the layers."""


class PagedAttention:
    """Attention of one step: writes the step's keys to the pool and attends to the pages.

    With `sizes` a token's result does not depend on what else is in the batch, to the bit.
    """

    def __init__(self, pool: KVPool, batch: PagedBatch, sizes: AttentionSizes | None = None) -> None:
        self._pool = pool
        self._batch = batch
        self._sizes = sizes
        self._plans: dict[tuple[int, int | None], AttentionPlan] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        write_kv(k, v, *self._pool.layers[layer], self._batch.slots)
        return self._attend(layer, q, options)

    def _attend(self, layer: int, q: Tensor, options: AttentionOptions) -> Tensor:
        """Of q [T, H, D] to the pages, where the step's own keys are already."""
        k_pool, v_pool = self._pool.layers[layer]
        return paged_tree_attention(
            q,
            k_pool,
            v_pool,
            self._plan(q.shape[1] // k_pool.shape[2], options.window),
            scaling=options.scaling,
            softcap=options.softcap,
            sinks=options.sinks,
        )

    def _plan(self, group_size: int, window: int | None) -> AttentionPlan:
        plan = self._plans.get((group_size, window))
        if plan is None:
            pool = self._pool
            plan = plan_attention(
                self._batch,
                pool.block_size,
                pool.dtype,
                group_size=group_size,
                window=window,
                sizes=self._sizes,
            )
            self._plans[group_size, window] = plan
        return plan


class FusedPagedAttention(PagedAttention, RotatingAttention):
    def attend_unrotated(
        self, layer: int, qk: Tensor, v: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions
    ) -> Tensor:
        from gammaray.kernels.fused.rope import rotate_and_write

        q = qk.new_empty(qk.shape[0], qk.shape[1] - v.shape[1], qk.shape[2])
        rotate_and_write(qk, v, cos, sin, self._batch.slots, *self._pool.layers[layer], q)
        return self._attend(layer, q, options)


def paged_attention(pool: KVPool, batch: PagedBatch, sizes: AttentionSizes | None = None) -> PagedAttention:
    """By the backend of the pool's device; deterministic attention is torch's."""
    fused = sizes is None and backend(pool.device) == "fused"
    return (FusedPagedAttention if fused else PagedAttention)(pool, batch, sizes)


class DenseAttention:
    """Causal attention over one whole sequence, in float32 and without pages; keeps each layer's KV."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> k [T, Hkv, D], v [T, Hkv, Dv]
        self.options: dict[int, AttentionOptions] = {}
        self.heads: dict[int, int] = {}  # layer -> H, of the queries

    @property
    def shapes(self) -> list[KVShape]:
        """Each layer's KV for one token."""
        pairs = (self.kv[layer] for layer in range(len(self.kv)))
        return [KVShape(k.shape[1], k.shape[2], v.shape[2]) for k, v in pairs]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        if layer in self.kv:
            raise ValueError(f"layer {layer} attends more than once in one forward pass")
        self.kv[layer] = (k, v)
        self.options[layer] = options
        self.heads[layer] = q.shape[1]
        group_size = q.shape[1] // k.shape[1]
        keys = k.float().repeat_interleave(group_size, 1)  # [T, H, D]
        values = v.float().repeat_interleave(group_size, 1)
        scores = torch.einsum("ihd,jhd->hij", q.float(), keys) * options.scaling  # [H, T, T]
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        scores = scores.masked_fill(~_causal(len(q), options.window, q.device), float("-inf"))
        if options.sinks is not None:
            column = options.sinks.float()[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat([scores, column], -1)
        weights = torch.softmax(scores, -1)[..., : len(q)]
        return torch.einsum("hij,jhd->ihd", weights, values).to(q.dtype)


def _causal(length: int, window: int | None, device: torch.device) -> Tensor:
    """[T, T] bool: which keys (columns) each query (row) sees."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)
