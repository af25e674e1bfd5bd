"""Draft heads in 8 bits a weight."""

from __future__ import annotations

import pytest
import torch

from gammaray.engine.drafters.int8_rows import packed, plain
from gammaray.errors import ConfigError

SIZES = torch.tensor([[1e-3], [1], [50], [0]])  # of its rows
MATRIX = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * SIZES


def test_a_weight_moves_by_at_most_half_a_step_of_its_own_row() -> None:
    """One scale for all rows would lose the small ones; a row of zeros must not become NaN."""
    kept = {"norm.weight": torch.ones(3), "d2t": torch.tensor([[1, 2]])}
    stored = packed({"a.weight": MATRIX.bfloat16(), **kept})
    assert stored["a.weight"].dtype == torch.int8
    found = plain(stored, "here")
    assert found.keys() == {"a.weight", *kept} and all(found[key] is x for key, x in kept.items())
    given = MATRIX.bfloat16().float()
    half_a_step = given.abs().amax(1, keepdim=True) / 254
    assert ((found["a.weight"] - given).abs() <= half_a_step * 1.001).all()
    assert found["a.weight"][1].abs().max() == pytest.approx(float(given[1].abs().max()))


def test_scales_may_have_one_dimension_and_16_bits() -> None:
    steps = torch.tensor([[1, -2], [3, 4]], dtype=torch.int8)
    found = plain({"w": steps, "w_scale": torch.tensor([0.5, 2.0], dtype=torch.bfloat16)}, "here")["w"]
    assert found.tolist() == [[0.5, -1.0], [6.0, 8.0]]


@pytest.mark.parametrize("scales", [{}, {"w_scale": torch.ones(1)}, {"w_scale": torch.ones(2, 3)}])
def test_int8_without_a_scale_a_row_is_refused(scales: dict[str, torch.Tensor]) -> None:
    """Read as it is, it would be a head with weights of up to 127."""
    with pytest.raises(ConfigError, match=r"here: w is int8 \[2, 3\].*w_scale"):
        plain({"w": torch.ones(2, 3, dtype=torch.int8), **scales}, "here")
