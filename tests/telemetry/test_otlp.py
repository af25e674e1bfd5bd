"""OTLP, with a real gRPC collector, and with none."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from support.otlp import receiver
from support.reports import ENDED, counts, step

from gammaray.config import Config, parse
from gammaray.telemetry import names, otlp
from gammaray.telemetry.meters import Meters
from gammaray.telemetry.replica import ReplicaTelemetry
from gammaray.telemetry.tracing import provider


def config(endpoint: str | None) -> Config:
    return parse({"target": {"model": "m"}, "telemetry": {"otlp_endpoint": endpoint}}, "test")


@pytest.fixture
def unfiltered() -> Iterator[None]:
    """As in a fresh process: the filters that let a logger speak once have not been used up."""
    loggers = [logging.getLogger(name) for name in otlp.LOGGERS]
    kept = [logger.filters for logger in loggers]
    for logger in loggers:
        logger.filters = []
    yield
    for logger, filters in zip(loggers, kept, strict=True):
        logger.filters = filters


def test_metrics_arrive_exactly() -> None:
    with receiver() as collector:
        replica = ReplicaTelemetry(config(collector.endpoint), "target-0", None)
        replica.record(step(counts(), finished=(ENDED, ENDED)))
        replica.close()  # sends what there is
    [rounds] = collector.metrics[names.ROUNDS.name].sum.data_points
    assert rounds.as_double == 20
    assert {a.key: a.value.string_value for a in rounds.attributes}["tenant"] == "chat"
    [ttft] = collector.metrics[names.TTFT.name].histogram.data_points
    assert (ttft.sum, ttft.count) == (1.0, 2)
    assert collector.metrics[names.TTFT.name].unit == "s"
    attributes = {a.key: a.value.string_value for a in collector.resources[0].attributes}
    assert attributes["service.name"] == "gammaray" and attributes["service.instance.id"] == "target-0"


def test_they_come_by_themselves() -> None:
    with receiver() as collector:
        meters = Meters("x", [otlp.metric_reader(collector.endpoint, interval_s=0.05)])
        meters.watch(names.RUNNING, lambda: [])
        meters.histogram(names.TTFT).record(0.5)
        assert collector.came.wait(30)
        meters.close()
    assert names.TTFT.name in collector.metrics


def test_without_an_endpoint_nothing_is_sent() -> None:
    with receiver() as collector:
        replica = ReplicaTelemetry(config(None), "target-0", None)
        replica.record(step(counts()))
        replica.close()
        assert not collector.came.is_set()


def test_spans_arrive() -> None:
    with receiver() as collector:
        made = provider([otlp.span_processor(collector.endpoint)])
        made.get_tracer("test").start_span("one").end()
        made.shutdown()
    assert [span.name for span in collector.spans] == ["one"]


@pytest.mark.usefixtures("unfiltered")
def test_a_collector_that_is_away_is_logged_once_and_disturbs_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "TIMEOUT_S", 0.2)
    with receiver() as collector:
        away = collector.endpoint  # and nobody else takes that port at once
    meters = Meters("x", [reader := otlp.metric_reader(away, interval_s=3600)])
    counter = meters.histogram(names.TTFT)
    spans = provider([otlp.span_processor(away)])
    for _ in range(3):
        counter.record(0.5)
        reader.force_flush()
        spans.get_tracer("test").start_span("one").end()
        spans.force_flush()
    assert names.TTFT.prometheus.encode() in meters.text()
    meters.close()
    spans.shutdown()
    told = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert len(told) == 1, caplog.text
    assert (
        told[0]
        .getMessage()
        .startswith("telemetry is lost (further failures are not logged): Failed to export")
    )


def test_of_all_failures_the_first_that_lost_something_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A retry is not yet a loss."""
    logger = logging.getLogger("test.otlp")
    logger.addFilter(otlp.Once())
    logger.warning("retrying in %d s", 1)
    logger.error("lost %d points", 3)
    logger.error("lost %d points", 4)
    assert caplog.messages == ["telemetry is lost (further failures are not logged): lost 3 points"]
