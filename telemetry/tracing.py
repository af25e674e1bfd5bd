"""Where spans go, and the span of a request in the ingress.

Ray Serve calls `span_processors` in its proxies and replicas, and owns the provider there; elsewhere
`provider` makes one. A request that is traced carries its W3C traceparent to the replica (`spans.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gammaray.config import Telemetry
from gammaray.telemetry import names, otlp

ENDPOINT = "GAMMARAY_OTLP_ENDPOINT"  # told to the processes that Serve starts
PROPAGATOR = TraceContextTextMapPropagator()


def environment(telemetry: Telemetry) -> dict[str, str]:
    """Variables that make Serve trace; to be set before Ray starts. Empty when nothing is traced."""
    if telemetry.otlp_endpoint is None or not telemetry.trace_ratio:
        return {}
    return {
        "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": f"{__name__}:span_processors",
        "RAY_SERVE_TRACING_SAMPLING_RATIO": str(telemetry.trace_ratio),
        ENDPOINT: telemetry.otlp_endpoint,
    }


def span_processors() -> list[SpanProcessor]:
    """Serve's hook. It must not raise: the deployment would fail."""
    endpoint = os.environ.get(ENDPOINT)
    return [otlp.span_processor(endpoint)] if endpoint else []


def provider(processors: Sequence[SpanProcessor], ratio: float = 1.0) -> TracerProvider:
    """For a process without Serve. `ratio`: of requests that nobody decided about."""
    made = TracerProvider(
        ParentBasedTraceIdRatio(ratio), Resource.create({"service.name": "gammaray"}), shutdown_on_exit=False
    )
    for processor in processors:
        made.add_span_processor(processor)
    return made


@contextmanager
def request_span(
    tracer: Tracer, tenant: str, route: str, request_id: str, parent: str | None = None
) -> Iterator[str | None]:
    """The span of an HTTP request; yields what GenerateRequest.trace is to be, None when it is not sampled.

    `parent`: the client's traceparent, for where Serve has not read it. What is raised inside stays out of
    the span, as an error's text may quote the request.
    """
    serving = trace.get_current_span().get_span_context().is_valid
    context = None if serving or parent is None else context_of(parent)
    about = {names.TENANT: tenant, names.ROUTE: route, names.REQUEST_ID: request_id}
    span = tracer.start_span(names.SPAN_REQUEST, context, attributes=about)
    try:
        yield traceparent(span)
    finally:
        span.end()


def traceparent(span: Span) -> str | None:
    """W3C's form; None of a span that nobody records."""
    if not span.get_span_context().trace_flags.sampled:
        return None
    carrier: dict[str, str] = {}
    PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier["traceparent"]


def context_of(parent: str) -> Context:
    """Of a traceparent; empty when it is malformed."""
    return PROPAGATOR.extract({"traceparent": parent}, Context())
