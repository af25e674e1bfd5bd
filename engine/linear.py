"""Linear layers whose weights oneDNN has laid out for this CPU.

A packed matrix reads memory at full speed for 1 to about 5 tokens, which is what makes verifying a draft as
cheap as decoding one token. The two calls are private to torch, so each packed layer proves itself
against `F.linear` first and stays plain when it cannot.

An invariant layer gives each row the same bits in every batch: it calls either kind with row counts only that
were seen to agree (`kernels/invariant.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gammaray.kernels.invariant import ROWS, Sizes, cancelling, proven_rows

logger = logging.getLogger(__name__)

TYPICAL_TOKENS = 5  # the batch that oneDNN lays weights out for
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # of the largest result


class PackedLinear(nn.Module):
    """y = x W^T + b with a packed W. Keeps no plain copy; `weight` unpacks one on request."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TYPICAL_TOKENS)
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        plain: Tensor = self._packed.to_dense()
        return plain

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y


class PlainLinear(nn.Module):
    """y = x W^T + b, where packing is not possible."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class InvariantLinear(nn.Module):
    """A layer whose rows do not depend on one another: calls are padded, and cut, to proven row counts."""

    def __init__(self, layer: PackedLinear | PlainLinear, rows: Sizes) -> None:
        super().__init__()
        self._layer = layer
        self._rows = rows

    @property
    def weight(self) -> Tensor:
        return self._layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self._layer.bias

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            return self.forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        if x.shape[0] in self._rows.proven:
            return self._layer.forward(x.contiguous())
        return torch.cat([self._padded(part) for part in x.split(self._rows.most)])

    def _padded(self, x: Tensor) -> Tensor:
        missing = self._rows.fit(x.shape[0]) - x.shape[0]
        return self._layer.forward(F.pad(x, (0, 0, 0, missing)))[: x.shape[0]]


class InvariantLinears:
    """Packs layers so that they are invariant, and knows the row counts that all of them have proven."""

    def __init__(self) -> None:
        self._rows = Sizes(ROWS)

    @property
    def rows(self) -> Sizes:
        return self._rows

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> InvariantLinear:
        """Speaks `Pack`. Raises NotInvariant where no row counts agree."""
        layer = pack_linear(weight, bias)
        packed, biased = isinstance(layer, PackedLinear), bias is not None
        rows = _agreeing_rows(*weight.shape, weight.dtype, packed, biased, torch.get_num_threads())
        self._rows = self._rows.shared(rows)
        return InvariantLinear(layer, rows)


Pack = Callable[[Tensor, Tensor | None], PackedLinear | PlainLinear | InvariantLinear]


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | PlainLinear:
    """The fastest layer for weight [out, in] and bias [out] that computes what `F.linear` does."""
    if not weight.is_cpu:
        return PlainLinear(weight, bias)
    try:
        packed = PackedLinear(weight, bias)
        if _agrees(packed, weight, bias):
            return packed
        _warn_once("oneDNN's packed linear differs from F.linear, using the latter")
    except (RuntimeError, AttributeError) as error:
        _warn_once(f"oneDNN cannot pack a {weight.dtype} weight, using F.linear: {error}")
    return PlainLinear(weight, bias)


@lru_cache
def _warn_once(message: str) -> None:
    """A model has hundreds of layers."""
    logger.warning(message)


def pack_module(model: nn.Module, pack: Pack = pack_linear) -> None:
    """Replace every plain `nn.Linear` of a model by a packed one, freeing the originals one by one."""
    for parent, name in list(_linears(model)):
        linear = getattr(parent, name)
        setattr(parent, name, pack(linear.weight.detach(), _detached(linear.bias)))


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:  # subclasses may compute something else
                yield parent, name


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def _agrees(packed: PackedLinear, weight: Tensor, bias: Tensor | None) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, weight.shape[1], generator=generator).to(weight.dtype)
    expected = F.linear(x, weight, bias).float()
    error = (packed(x).float() - expected).abs().max()
    return bool(error <= TOLERANCE[weight.dtype] * expected.abs().max())


@lru_cache
def _agreeing_rows(
    columns: int, terms: int, dtype: torch.dtype, packed: bool, biased: bool, threads: int
) -> Sizes:
    """Row counts that agree for layers of one shape, when so many threads share the work.

    Which kernel runs depends on all of this, but not on the weights.
    """
    x, weight = cancelling(max(ROWS), columns, terms, dtype)
    bias = weight.new_zeros(columns) if biased else None
    return proven_rows(PackedLinear(weight, bias) if packed else PlainLinear(weight, bias), x)
