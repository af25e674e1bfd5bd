"""Names and their form in Prometheus."""

from __future__ import annotations

import re
from typing import get_args

from support.everything import told
from support.scraped import samples

from gammaray.telemetry import names
from gammaray.types import Cause, FinishReason, State


def test_names_differ_in_both_worlds() -> None:
    for every in ([m.name for m in names.METRICS], [s for m in names.METRICS for s in m.series]):
        assert len(every) == len(set(every))


def test_names_are_ones_that_both_worlds_take() -> None:
    for metric in names.METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_.]{0,254}", metric.name)
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.prometheus)
        assert metric.description and not metric.description.endswith(".")


def test_only_histograms_have_edges_and_these_rise() -> None:
    for metric in names.METRICS:
        assert bool(metric.edges) == (metric.kind == "histogram"), metric.name
        assert list(metric.edges) == sorted(set(metric.edges))


def test_acceptance_has_25_bins_of_four_hundredths() -> None:
    assert len(names.ALPHA.edges) + 1 == 25
    assert names.ALPHA.edges[0] == 0.04 and names.ALPHA.edges[-1] == 0.96


def test_the_words_are_those_of_the_types() -> None:
    assert set(names.STATES) == set(get_args(State)) and names.STATES[0] == "on"
    assert set(names.CAUSES) == set(get_args(Cause))
    assert set(names.REASONS) == set(get_args(FinishReason))


def test_every_metric_is_told_under_its_name_in_prometheus() -> None:
    text = told()
    silent = [m.name for m in names.METRICS if not all(samples(text, series) for series in m.series)]
    assert silent == []
