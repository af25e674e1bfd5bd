"""Linear layers whose weights oneDNN has laid out for this CPU.

A packed matrix reads memory at full speed for 1 to about 5 tokens, which is what makes verifying a draft as
cheap as decoding one token. The two calls are private to torch, so each packed layer proves itself
against `F.linear` first and stays plain when it cannot.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | PlainLinear:
    """The fastest layer for weight [out, in] and bias [out] that computes what `F.linear` does."""
    try:
        packed = PackedLinear(weight, bias)
        if _agrees(packed, weight, bias):
            return packed
        logger.warning("oneDNN's packed linear differs from F.linear, using the latter")
    except (RuntimeError, AttributeError) as error:
        logger.warning("oneDNN cannot pack a %s weight, using F.linear: %s", weight.dtype, error)
    return PlainLinear(weight, bias)


def pack_module(model: nn.Module) -> None:
    """Replace every plain `nn.Linear` of a model by a packed one, freeing the originals one by one."""
    for parent, name in list(_linears(model)):
        linear = getattr(parent, name)
        setattr(parent, name, pack_linear(linear.weight.detach(), _detached(linear.bias)))


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
