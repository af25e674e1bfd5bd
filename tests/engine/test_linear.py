"""Packed linear layers equal F.linear, and step aside when they do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gammaray.engine import linear
from gammaray.engine.linear import (
    InvariantLinears,
    PackedLinear,
    PlainLinear,
    pack_linear,
    pack_module,
)


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


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_invariant_rows_are_alike_in_every_batch(
    dtype: torch.dtype, packed: bool, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1536 terms: there even oneDNN sums a single row in another order."""
    torch.manual_seed(0)
    if not packed:
        monkeypatch.setattr(linear, "_agrees", lambda *_: False)
    weight, bias = torch.randn(48, 1536).to(dtype), torch.randn(48).to(dtype) if with_bias else None
    layer = InvariantLinears().pack(weight, bias)
    assert torch.equal(layer.weight, weight) and layer.bias is bias
    x = torch.randn(600, 1536).to(dtype)
    alone = torch.cat([layer(row[None]) for row in x[:80]])
    tolerance = 1e-3 if dtype is torch.float32 else 1.0
    torch.testing.assert_close(alone, F.linear(x[:80], weight, bias), atol=tolerance, rtol=0.02)
    for first, rows in [(0, 2), (1, 3), (7, 5), (60, 9), (3, 37), (0, 65), (0, 257), (0, 600)]:
        y = layer(x[first : first + rows])
        assert torch.equal(y[: 80 - first], alone[first : first + rows])
        assert torch.equal(layer(x[None, first : first + rows])[0], y)


def test_invariant_layers_know_the_counts_they_share() -> None:
    linears = InvariantLinears()
    pack_module(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1536), nn.Linear(1536, 8)), linears.pack)
    assert linears.rows.most == max(linear.ROWS)
    assert linears.rows.fit(1) >= 2
