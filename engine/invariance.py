"""Fail closed: before a model serves deterministically, the same tokens must give the same bits everywhere.

`kernels/invariant.py` and `kernels/paths.py` find call sizes that agree, shape by shape. Here the whole model
is put to the test: one sequence decoded plainly and alone, and again in chunks, a draft tree and a chain, in
shuffled blocks beside another request. Logits and KV must be equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from gammaray.engine.attention import (
    Attention,
    AttentionOptions,
    DenseAttention,
    LayeredModel,
    Model,
    PagedAttention,
)
from gammaray.engine.batch import Row, pack
from gammaray.engine.pool import KVPool, KVShape
from gammaray.errors import ModelUnsupported
from gammaray.kernels.invariant import Sizes, by_rows, check_elementwise
from gammaray.kernels.paths import AttentionSizes, prove

LENGTH, OTHERS = 32, 72  # tokens of the sequence, and of the request beside it
BLOCK_SIZE, BLOCKS = 4, 48
FIRST = 8  # tokens that plain decoding is given at once
TREE_PARENTS = (-1, -1, 0, 1, 1, 4, 3, 5, 5, 7)
TRUE_NODES = (1, 4, 5, 8)  # the path through the tree that holds the sequence's own tokens


class RowPadded:
    """Implements `gammaray.engine.attention.Model` with row counts that its layers have proven.

    The rows that pad a call never reach the attention.
    """

    def __init__(self, model: Model, rows: Sizes) -> None:
        self._model = model
        self._rows = rows

    @property
    def embeddings(self) -> Tensor:
        return self._model.embeddings

    def first(self, layers: int, end: PreTrainedModel | None = None) -> RowPadded:
        """See `gammaray.engine.attention.LayeredModel`."""
        if not isinstance(self._model, LayeredModel):
            raise ModelUnsupported("the form of the model that is deterministic cannot end early")
        return RowPadded(self._model.first(layers, end), self._rows)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Attention, wanted: Tensor | None
    ) -> Tensor:
        tokens = len(input_ids)
        missing = self._missing(tokens)
        if missing:
            input_ids, positions = F.pad(input_ids, (0, missing)), F.pad(positions, (0, missing))
            attention = _Shortened(attention, tokens)
        if wanted is None:
            return self._model.forward(input_ids, positions, attention, None)[:tokens]
        padded = F.pad(wanted, (0, self._missing(len(wanted)) if len(wanted) else 0))
        return self._model.forward(input_ids, positions, attention, padded)[: len(wanted)]

    def _missing(self, rows: int) -> int:
        """Rows up to the next proven count, beyond the full calls that a large number is cut into."""
        rest = (rows - 1) % self._rows.most + 1
        return self._rows.fit(rest) - rest


@dataclass(frozen=True, slots=True)
class _Shortened:
    """Attention to the leading tokens only."""

    inner: Attention
    tokens: int

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        own = self.tokens
        found = self.inner.attend(layer, q[:own], k[:own], v[:own], options)
        return F.pad(found, (0, 0, 0, 0, 0, q.shape[0] - own))


class RowWise(nn.Module):
    """An activation function that computes each row alike however many there are."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return by_rows(self._activation, x.reshape(-1, x.shape[-1])).view(x.shape)


def make_rows_independent(model: nn.Module) -> None:
    """Wrap the activation functions of a Hugging Face model whose linear layers are packed already.

    Raises ModelUnsupported for matrices that other modules multiply with: nothing is known of their sums, and
    the experts of a mixture take as many rows as the router sends them.
    """
    for name, module in model.named_modules():
        matrices = [key for key, weight in module.named_parameters(recurse=False) if weight.ndim > 1]
        if matrices and not isinstance(module, nn.Embedding):
            raise ModelUnsupported(
                f"{name} ({type(module).__name__}) multiplies with its {matrices[0]!r} outside of nn.Linear, "
                "so the rows of a batch may change each other's rounding"
            )
    known: Any = tuple(entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values())
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, known):
                setattr(parent, name, RowWise(child))


def prove_attention(seen: DenseAttention, dtype: torch.dtype) -> AttentionSizes:
    """Sizes that suit every layer that was seen. Raises ModelUnsupported or NotInvariant."""
    check_elementwise(dtype)
    kinds: dict[tuple[int, KVShape], None] = {}
    for layer, shape in enumerate(seen.shapes):
        options = seen.options[layer]
        if options.softcap is not None or options.sinks is not None:
            raise ModelUnsupported(f"the attention of layer {layer} has a soft cap or sinks")
        if shape.k_dim != shape.v_dim:
            raise ModelUnsupported(f"keys and values of layer {layer} differ in width")
        kinds[seen.heads[layer], shape] = None
    proven = (prove(heads, shape.kv_heads, shape.k_dim, dtype) for heads, shape in kinds)
    return reduce(AttentionSizes.shared, proven)


def check(
    model: Model, shapes: Sequence[KVShape], dtype: torch.dtype, sizes: AttentionSizes, vocab_size: int
) -> None:
    """Raises ModelUnsupported unless a sequence has the same bits alone and among others."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(vocab_size, (LENGTH,), generator=generator).tolist()
    others = torch.randint(vocab_size, (OTHERS,), generator=generator).tolist()
    blocks = torch.randperm(BLOCKS, generator=generator).tolist()
    trial = _Trial(model, sizes, KVPool(shapes, BLOCKS, BLOCK_SIZE, dtype))
    alone, beside, among = blocks[:8], blocks[8:26], blocks[26:]
    plain = torch.cat(
        [
            trial.forward([Row(tokens[start:end], start, alone)])
            for start, end in ((0, FIRST), *((at, at + 1) for at in range(FIRST, LENGTH)))
        ]
    )  # [LENGTH - FIRST + 1, V]
    at = 0
    for what, logits in _among_others(trial, tokens, among, others, beside):
        if not torch.equal(logits, plain[at : at + len(logits)]):
            raise ModelUnsupported(f"{what} has other bits than plain decoding alone")
        at += len(logits)
    for layer, (k, v) in enumerate(trial.pool.layers):
        for pool in (k, v):
            if not torch.equal(pool[alone], pool[among[: len(alone)]]):
                raise ModelUnsupported(f"the KV of layer {layer} has other bits than that of plain decoding")


@dataclass(frozen=True, slots=True)
class _Trial:
    model: Model
    sizes: AttentionSizes
    pool: KVPool

    def forward(self, rows: Sequence[Row]) -> Tensor:
        step = pack(rows, self.pool.block_size)
        attention = PagedAttention(self.pool, step.paged, self.sizes)
        return self.model.forward(step.input_ids, step.paged.positions, attention, step.wanted)


def _among_others(
    trial: _Trial, tokens: list[int], blocks: list[int], others: list[int], beside: list[int]
) -> Iterator[tuple[str, Tensor]]:
    """The sequence's logits from token FIRST - 1 on, computed in every way but plainly, piece by piece."""
    trial.forward([Row(others[:64], 0, beside, logits=0), Row(tokens[:5], 0, blocks, logits=0)])
    yield (
        "a prompt's chunk",
        trial.forward([Row(tokens[5:13], 5, blocks, logits=6), Row(others[64:65], 64, beside)])[:6],
    )
    tree = [*others[:10]]
    for node, token in zip(TRUE_NODES, tokens[14:18], strict=True):
        tree[node] = token
    logits = trial.forward(
        [
            Row(others[65:67], 65, beside, others[67:70], range(-1, 2)),
            Row(tokens[13:14], 13, blocks, tree, TREE_PARENTS),
        ]
    )[4:]
    yield "a draft tree", logits[[0, *(node + 1 for node in TRUE_NODES)]]
    slots = [blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(LENGTH)]
    source = [slots[14 + node] for node in TRUE_NODES]
    trial.pool.move(torch.tensor(source), torch.tensor(slots[14:18]))
    yield "a draft chain", trial.forward([Row(tokens[18:19], 18, blocks, tokens[19:], range(-1, 12))])
