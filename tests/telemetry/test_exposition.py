"""The text is what Prometheus' own parser understands, also with names that nobody should choose."""

from __future__ import annotations

import pytest
from opentelemetry.metrics import Observation
from support.everything import told
from support.scraped import value

from gammaray.telemetry import names
from gammaray.telemetry.meters import Meters
from gammaray.telemetry.sockets import merge


@pytest.mark.parametrize(
    "tenant", ['say "hi"', "back\\slash", "two\nlines", "\u2028 and \x0b", "größe", "{a=1}"]
)
def test_names_come_back_as_they_were(tenant: str) -> None:
    meters = Meters("target-0")
    meters.watch(names.RUNNING, lambda: [Observation(1, {"tenant": tenant})])
    assert value(merge([meters.text()]), names.RUNNING.prometheus, tenant=tenant) == 1


@pytest.mark.parametrize("number", [0.1 + 0.2, 1e-12, 1.7976931348623157e308, 1_700_000_000.123456, 2**53])
def test_numbers_come_back_exactly(number: float) -> None:
    meters = Meters("target-0")
    meters.watch(names.RUNNING, lambda: [Observation(number)])
    assert value(meters.text(), names.RUNNING.prometheus) == number


def test_nothing_is_told_before_there_is_something() -> None:
    assert Meters("target-0").text() == b""


def test_each_series_comes_once() -> None:
    lines = [line.rpartition(" ")[0] for line in told().decode().splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines)) > 400
