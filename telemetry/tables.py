"""Sums and values in plain dictionaries: a step touches these, and instruments read them when asked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import isnan

from opentelemetry.metrics import Observation

from gammaray.telemetry.meters import Meters
from gammaray.telemetry.names import Metric

Rows = dict[tuple[str, ...], list[float]]


class Table:
    """A row for each set of attribute values, a column a metric; NaN: no value.

    One thread writes, any may read.
    """

    def __init__(self, meters: Meters, attributes: Sequence[str], metrics: Sequence[Metric]) -> None:
        self._attributes, self._width = tuple(attributes), len(metrics)
        self._rows: Rows = {}
        for column, metric in enumerate(metrics):
            meters.watch(metric, partial(self._observe, column))

    def row(self, labels: tuple[str, ...]) -> list[float]:
        """To add to; zeros at first."""
        row = self._rows.get(labels)
        if row is None:
            row = self._rows[labels] = [0.0] * self._width
        return row

    def add(self, labels: tuple[str, ...], *values: float) -> None:
        """One value a column."""
        row = self.row(labels)
        for column, value in enumerate(values):
            row[column] += value

    def replace(self, rows: Rows) -> None:
        """All rows by others."""
        self._rows = rows

    def _observe(self, column: int) -> list[Observation]:
        rows = self._rows.copy()  # in one go: the writer may add a row meanwhile
        return [
            Observation(row[column], dict(zip(self._attributes, labels, strict=True)))
            for labels, row in rows.items()
            if not isnan(row[column])
        ]
