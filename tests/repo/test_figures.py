"""The figures of the documentation are those of the results beside them: nobody forgets to draw them anew."""

from __future__ import annotations

import importlib.util

import pytest
from support.pages import ROOT

SPEC = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks" / "figures.py")
assert SPEC is not None and SPEC.loader is not None
figures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(figures)


@pytest.mark.parametrize("name", figures.figures())
def test_a_figure_shows_the_present_results(name: str) -> None:
    assert (ROOT / "docs" / "pictures" / name).read_text() == figures.figures()[name]


def test_all_that_was_measured_is_in_them() -> None:
    """A result whose form has changed would else leave an empty figure."""
    assert [len(figures.speedups(by)) for by in ("drafter", "category")] == [7, 13]
    assert [len(figures.overlaps(concurrency)) for concurrency in (1, 8)] == [12, 12]
