"""The metrics of one process: a MeterProvider of our own, for Prometheus and, if asked for, OTLP."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricReader
from opentelemetry.sdk.resources import Resource

from gammaray import __version__
from gammaray.config import Config
from gammaray.telemetry import otlp, sockets
from gammaray.telemetry.exposition import render
from gammaray.telemetry.names import INSTANCE, Metric

log = logging.getLogger(__name__)

Observe = Callable[[], Iterable[Observation]]


class Meters:
    """`instance` names the process among those of its node, and is a label of every series."""

    def __init__(self, instance: str, readers: Sequence[MetricReader] = ()) -> None:
        self.instance = instance
        self._reader = InMemoryMetricReader(cardinality_limits=otlp.LIMITS)
        about = {
            "service.name": "gammaray",
            "service.version": __version__,
            INSTANCE: instance,
            "host.name": socket.gethostname(),
        }
        self._provider = MeterProvider(
            [self._reader, *readers],
            Resource.create(about),
            AlwaysOffExemplarFilter(),
            shutdown_on_exit=False,  # Ray ends processes without it, and it could wait for a dead endpoint
        )
        self._meter = self._provider.get_meter("gammaray", __version__)
        self._more: list[Callable[[], str]] = []
        self._socket: sockets.Registration | None = None

    def watch(self, metric: Metric, observe: Observe) -> None:
        """`observe` is asked for the counter's or gauge's values at each collection, in any thread."""
        create = (
            self._meter.create_observable_counter
            if metric.kind == "counter"
            else self._meter.create_observable_gauge
        )

        def callback(options: CallbackOptions) -> Iterable[Observation]:
            return observe()

        create(metric.name, [callback], metric.unit, metric.description)

    def before_collecting(self, flush: Callable[[], None]) -> None:
        """`flush` may still give values to histograms."""

        def callback(options: CallbackOptions) -> Iterable[Observation]:
            flush()
            return ()  # callbacks come first in a collection, and this one is there for nothing else

        self._meter.create_observable_gauge(f"gammaray.flush.{flush.__qualname__}", [callback])

    def histogram(self, metric: Metric) -> Histogram:
        made = self._meter.create_histogram(
            metric.name,
            metric.unit,
            metric.description,
            explicit_bucket_boundaries_advisory=metric.edges,
        )
        assert isinstance(made, Histogram)  # of the SDK, as its provider is ours
        return made

    def text(self) -> bytes:
        """In Prometheus' text format."""
        own = render(self._reader.get_metrics_data(), {INSTANCE: self.instance})
        return "".join([own, *(more() for more in self._more)]).encode()

    def also(self, text: Callable[[], str]) -> None:
        """`text` gives families that OpenTelemetry has no names for."""
        self._more.append(text)

    def serve(self, directory: Path) -> None:
        """From now on `sockets.gather(directory)` finds this process."""
        try:
            self._socket = sockets.register(directory, self.instance, self.text)
        except OSError as error:  # metrics are missing then; requests must not be
            log.error("metrics of %s cannot be read: %s", self.instance, error)

    def close(self) -> None:
        """Sends what an OTLP reader still has, for a few seconds at most."""
        if self._socket is not None:
            self._socket.close()
        self._provider.shutdown(timeout_millis=otlp.TIMEOUT_S * 1000)


def open_meters(config: Config, instance: str, directory: Path | None) -> Meters:
    """The metrics of this process as the configuration wants them; `directory`: see sockets.folder."""
    endpoint = config.telemetry.otlp_endpoint
    meters = Meters(instance, [otlp.metric_reader(endpoint)] if endpoint else [])
    if directory is not None:
        meters.serve(directory)
    return meters
