from __future__ import annotations

import numpy as np
import pytest
import torch

from gammaray.engine import projection as module
from gammaray.engine.projection import projection


def embeddings(vocabulary: int = 300, hidden: int = 64) -> torch.Tensor:
    return 0.02 * torch.randn(vocabulary, hidden, generator=torch.Generator().manual_seed(3)) + 0.5


def test_a_row_for_each_token_at_unit_scale() -> None:
    table = projection(embeddings().to(torch.bfloat16))
    assert (table.shape, table.dtype) == ((300, 8), np.float16)
    wide = table.astype(np.float64)
    np.testing.assert_allclose(wide.mean(0), 0, atol=1e-3)
    assert wide.std() == pytest.approx(1, abs=1e-3)


def test_as_many_directions_as_numbers_only_turn_the_space() -> None:
    """Were they not orthonormal, some distances would grow against others."""
    given = embeddings(50, 8)
    turned = torch.from_numpy(projection(given, dims=8).astype(np.float32))
    ratio = torch.pdist(turned) / torch.pdist(given)
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=5e-3, atol=0)


def test_the_seed_decides() -> None:
    assert np.array_equal(projection(embeddings(), seed=1), projection(embeddings(), seed=1))
    assert not np.allclose(projection(embeddings(), seed=1), projection(embeddings(), seed=2), atol=0.1)


def test_the_size_of_the_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = projection(embeddings())
    monkeypatch.setattr(module, "ROWS", 7)
    np.testing.assert_allclose(projection(embeddings()), whole, atol=2e-3)


def test_equal_embeddings_are_all_zero() -> None:
    assert not projection(torch.ones(5, 16)).any()


def test_more_directions_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="embeddings of 4 numbers have no 8"):
        projection(torch.ones(5, 4))
