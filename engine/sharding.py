"""Cutting a transformers model to one of n ranks, by the tensor-parallel plan of its own configuration.

    colwise   a rank keeps its share of a layer's outputs: its attention heads, its part of the MLP
    rowwise   a rank keeps its share of the inputs, and the ranks' partial results are summed

(Megatron-LM, arXiv 1909.08053, section 3.) Norms, embeddings and the head stay whole on every rank. Whether
the parts together compute what the whole does is proven at load (`selfcheck.py`), not assumed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from gammaray.errors import ConfigError, ModelUnsupported

REPLICATED = frozenset({"replicate", "replicated_with_grad_allreduce"})
MOST = 8  # ranks, as the configuration allows

Sum = Callable[[Tensor], Tensor]


class RowwiseLinear(nn.Module):
    """y = sum over ranks of (x W^T), + b, of which this rank holds x and W for its share of the inputs."""

    def __init__(self, inner: nn.Module, bias: Tensor | None, total: Sum) -> None:
        super().__init__()
        self.inner = inner  # without a bias: it must be added once
        self.bias = bias
        self._total = total

    def forward(self, x: Tensor) -> Tensor:
        y = self._total(self.inner(x).contiguous())
        return y if self.bias is None else y + self.bias


def cut(model: PreTrainedModel, rank: int, size: int, total: Sum) -> PreTrainedModel:
    """Leave of `model` what `rank` of `size` computes; `total` sums a tensor over the ranks, in place.

    Raises ConfigError for a size that does not divide its heads, ModelUnsupported for a model whose plan is
    missing or asks for more than the two cuts above.
    """
    name, config, base = type(model).__name__, model.config.get_text_config(), model.base_model
    check_heads(name, config, size)
    for path, style in _planned(name, config, base).items():
        parent, _, child = path.rpartition(".")
        linear = base.get_submodule(path)
        part = _colwise(path, linear, rank, size) if style == "colwise" else None
        setattr(base.get_submodule(parent), child, part or _rowwise(path, linear, rank, size, total))
    return model


def check_heads(name: str, config: Any, size: int) -> None:
    """Raises ConfigError unless each rank gets as many heads, of queries and of keys, and at least one."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if heads % size or kv_heads % size:
        fitting = [str(n) for n in range(1, MOST + 1) if heads % n == 0 and kv_heads % n == 0]
        raise ConfigError(
            f"tensor_parallel {size} does not divide the {heads} attention heads and {kv_heads} key-value "
            f"heads of {name}: use {' or '.join(fitting)}"
        )


def _planned(name: str, config: Any, base: nn.Module) -> dict[str, str]:
    """The modules to cut, by path in the base model: colwise or rowwise."""
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not plan:
        raise ModelUnsupported(f"{name} has no tensor-parallel plan in transformers: use tensor_parallel 1")
    for pattern, style in plan.items():
        if style not in REPLICATED | {"colwise", "rowwise"}:
            raise ModelUnsupported(
                f"the tensor-parallel plan of {name} cuts {pattern} by {style!r}, which is not supported "
                "(fused projections and experts are cut this way): use tensor_parallel 1"
            )
    found = {
        path: plan[pattern]
        for path, module in base.named_modules()
        if (pattern := re.sub(r"\.\d+(?=\.|$)", ".*", path)) in plan and plan[pattern] not in REPLICATED
    }
    for path in found:
        if type(module := base.get_submodule(path)) is not nn.Linear:
            raise ModelUnsupported(
                f"{path} of {name} is a {type(module).__name__}, and only nn.Linear can be cut: use "
                "tensor_parallel 1"
            )
    if not found:
        raise ModelUnsupported(
            f"the tensor-parallel plan of {name} names no module that it has: use tensor_parallel 1"
        )
    return found


def _colwise(path: str, linear: Any, rank: int, size: int) -> nn.Linear:
    rows = _share(path, "outputs", linear.out_features, rank, size)
    bias = None if linear.bias is None else linear.bias.detach()[rows]
    return _linear(linear.weight.detach()[rows], bias)


def _rowwise(path: str, linear: Any, rank: int, size: int, total: Sum) -> RowwiseLinear:
    columns = _share(path, "inputs", linear.in_features, rank, size)
    bias = None if linear.bias is None else linear.bias.detach()
    return RowwiseLinear(_linear(linear.weight.detach()[:, columns], None), bias, total)


def _share(path: str, what: str, count: int, rank: int, size: int) -> slice:
    if count % size:
        raise ConfigError(f"tensor_parallel {size} does not divide the {count} {what} of {path}")
    return slice(rank * count // size, (rank + 1) * count // size)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A plain layer around copies, so that the whole matrix can go."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.clone(), requires_grad=False)
    return linear
