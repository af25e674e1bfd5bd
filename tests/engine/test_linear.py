"""Packed linear layers equal F.linear, and step aside when they do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gammaray.engine import linear
from gammaray.engine.linear import PackedLinear, PlainLinear, pack_linear, pack_module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_equals_plain(dtype: torch.dtype, tokens: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(48, 32).to(dtype), torch.randn(48).to(dtype) if with_bias else None
    layer = pack_linear(weight, bias)
    assert isinstance(layer, PackedLinear)
    x = torch.randn(1, tokens, 32).to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 0.15
    torch.testing.assert_close(layer(x), F.linear(x, weight, bias), atol=tolerance, rtol=0.02)
    assert torch.equal(layer.weight, weight)


def _raises(*_: object) -> Tensor:
    raise RuntimeError("no such operation")


@pytest.mark.parametrize("fault", ["wrong numbers", "missing operation"])
def test_falls_back_to_plain(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "wrong numbers":
        right = PackedLinear.forward
        monkeypatch.setattr(PackedLinear, "forward", lambda self, x: right(self, x) * 1.01)
    else:
        monkeypatch.setattr(linear.torch.ops.mkldnn, "_reorder_linear_weight", _raises)
    weight, x = torch.randn(8, 4), torch.randn(3, 4)
    layer = pack_linear(weight)
    assert isinstance(layer, PlainLinear)
    assert torch.equal(layer(x), F.linear(x, weight))


def test_pack_module_replaces_plain_linears_only() -> None:
    class Special(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), Special(8, 8), nn.Sequential(nn.Linear(8, 4, bias=False))
    )
    x = torch.randn(5, 8)
    with torch.no_grad():
        expected = model(x)
        pack_module(model)
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)
    assert [type(m) for m in model.modules() if hasattr(m, "weight")] == [PackedLinear, Special, PackedLinear]
