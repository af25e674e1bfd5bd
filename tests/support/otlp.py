"""An OTLP collector on a port of this machine: what it is sent over gRPC, it keeps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class _Metrics(MetricsServiceServicer):  # type: ignore[misc]
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:
        parts = [one for resource in request.resource_metrics for one in resource.scope_metrics]
        self._receiver.exports.append(request)
        self._receiver.resources += [resource.resource for resource in request.resource_metrics]
        self._receiver.metrics |= {metric.name: metric for part in parts for metric in part.metrics}
        self._receiver.came.set()
        return ExportMetricsServiceResponse()


class _Spans(TraceServiceServicer):  # type: ignore[misc]
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:
        self._receiver.exports.append(request)
        parts = [one for resource in request.resource_spans for one in resource.scope_spans]
        self._receiver.spans += [span for part in parts for span in part.spans]
        self._receiver.came.set()
        return ExportTraceServiceResponse()


class Receiver:
    """`metrics`: the last of each name; `exports`: all that came, whole. `came` is set by each export."""

    def __init__(self) -> None:
        self.exports: list[Any] = []
        self.metrics: dict[str, Any] = {}
        self.resources: list[Any] = []
        self.spans: list[Any] = []
        self.came = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(2))
        add_MetricsServiceServicer_to_server(_Metrics(self), self._server)
        add_TraceServiceServicer_to_server(_Spans(self), self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait()


@contextmanager
def receiver() -> Iterator[Receiver]:
    opened = Receiver()
    try:
        yield opened
    finally:
        opened.close()
