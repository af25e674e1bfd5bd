"""A pod stays until the last stream that came in through it has ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gammaray.cluster.leave import POLL_S, SETTLE_S, leave
from gammaray.telemetry.ingress import IngressRecorder
from gammaray.telemetry.meters import Meters


@pytest.fixture
def directory() -> Iterator[Path]:
    """Where the processes of a machine meet. Shorter than pytest's own, whose length is not ours."""
    with TemporaryDirectory(prefix="gr-") as made:
        yield Path(made) / "m"


def waits(directory: Path, *opened: list[int]) -> list[float]:
    """How long it slept while each ingress had so many requests open, look after look."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert len(slept) < 20, "it waits for ever"

    all_meters = [Meters(f"ingress-{i}") for i in range(len(opened))]
    for meters, counts in zip(all_meters, opened, strict=True):
        IngressRecorder(meters, 10, lambda counts=counts: counts[min(len(slept) - 1, len(counts) - 1)])
        meters.serve(directory)
    try:
        leave(directory, sleep)
    finally:
        for meters in all_meters:
            meters.close()
    return slept


def test_it_waits_for_the_streams_of_every_ingress_here(directory: Path) -> None:
    assert waits(directory, [2, 1, 0], [0, 0, 1, 0]) == [SETTLE_S] + [POLL_S] * 5


def test_one_quiet_look_is_not_the_end(directory: Path) -> None:
    assert waits(directory, [1, 0, 1, 0]) == [SETTLE_S] + [POLL_S] * 5


def test_a_pod_without_an_ingress_goes_when_nobody_sends_to_it_any_more(directory: Path) -> None:
    assert waits(directory) == [SETTLE_S] + [POLL_S] * 2
