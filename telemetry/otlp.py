"""Sending metrics and spans to an OTLP collector over gRPC. One that is away costs nothing but its data."""

from __future__ import annotations

import logging

from opentelemetry.sdk.metrics import Histogram, ObservableCounter, ObservableGauge
from opentelemetry.sdk.metrics.export import CardinalityLimits, MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor

INTERVAL_S = 10.0  # of metrics
TIMEOUT_S = 5.0  # of one export, its retries included
# Of one instrument. What we tell apart is bounded by `telemetry.tenants`; the SDK's 2000 would fold it.
LIMITS: CardinalityLimits = dict.fromkeys((Histogram, ObservableCounter, ObservableGauge), 1_000_000)
LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.sdk.metrics._internal.export",
    "opentelemetry.sdk._shared_internal",
)


class Once(logging.Filter):
    """Lets one record of a logger pass: each export of an endpoint that is away would write a line."""

    def __init__(self) -> None:
        super().__init__()
        self._passed = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR or self._passed:
            return False
        self._passed = True
        record.msg = f"telemetry is lost (further failures are not logged): {record.getMessage()}"
        record.args = record.exc_info = None
        return True


def metric_reader(endpoint: str, interval_s: float = INTERVAL_S) -> MetricReader:
    """A thread of its own sends what there is, every `interval_s`. `endpoint`: http(s)://host:port."""
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    _log_once()
    exporter = OTLPMetricExporter(endpoint=endpoint, timeout=TIMEOUT_S)
    return PeriodicExportingMetricReader(exporter, interval_s * 1000, TIMEOUT_S * 1000, LIMITS)


def span_processor(endpoint: str) -> SpanProcessor:
    """Spans wait in a bounded queue; when it is full they are dropped."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    _log_once()
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S))


def _log_once() -> None:
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, Once) for known in logger.filters):
            logger.addFilter(Once())
