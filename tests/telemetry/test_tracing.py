"""One trace from the ingress to the rounds of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.otlp import receiver
from support.reports import ENDED, step

from gammaray.config import Telemetry
from gammaray.telemetry import names
from gammaray.telemetry.spans import EVERY, FIRST, NS, OPEN, StepSpans
from gammaray.telemetry.tracing import ENDPOINT, environment, provider, request_span, span_processors
from gammaray.types import Traced

NOW = 1_700_000_000 * NS
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DROPPED = PARENT[:-2] + "00"
PHASES = [names.SPAN_SCHEDULE, names.SPAN_DRAFT, names.SPAN_VERIFY, names.SPAN_ACCEPT]


class Trace:
    """A provider that keeps its spans, and a replica's part under a clock that stands still."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider: TracerProvider = provider([SimpleSpanProcessor(self._exporter)])
        self.tracer = self.provider.get_tracer("test")
        self.steps = StepSpans(self.tracer, lambda: NOW)

    def decode(self, rounds: int, request_id: str = ENDED.request_id, trace: str = PARENT) -> None:
        part = Traced(request_id, trace, "decode", fed=5, drafted=4, accepted=2, emitted=3)
        for _ in range(rounds):
            self.steps.record(step(traced=(part,)))

    def spans(self, *wanted: str) -> list[ReadableSpan]:
        return [one for one in self._exporter.get_finished_spans() if not wanted or one.name in wanted]


@pytest.fixture
def trace() -> Iterator[Trace]:
    made = Trace()
    yield made
    made.provider.shutdown()


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def about(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_rounds_are_children_of_the_ingress_and_phases_of_rounds(trace: Trace) -> None:
    trace.decode(1)
    [one] = trace.spans(names.SPAN_ROUND)
    assert parent_of(one) == int(PARENT.split("-")[2], 16)
    phases = trace.spans(*PHASES)
    assert [span.name for span in phases] == PHASES
    assert {parent_of(span) for span in phases} == {span_id(one)}
    assert {span.context.trace_id for span in trace.spans() if span.context} == {
        int(PARENT.split("-")[1], 16)
    }


def test_phases_take_what_they_took_and_end_now(trace: Trace) -> None:
    trace.decode(1)
    [one] = trace.spans(names.SPAN_ROUND)
    phases = trace.spans(*PHASES)
    lasted = [(span.end_time or 0) - (span.start_time or 0) for span in phases]
    assert lasted == pytest.approx([0.0005 * NS, 0.002 * NS, 0.01 * NS, 0.0015 * NS], abs=2)
    marks = [one.start_time, *(span.end_time for span in phases)]
    assert [span.start_time for span in phases] == marks[:-1] and marks[-1] == one.end_time == NOW
    told = {
        names.ROUND: 1,
        names.BATCH: 3,
        names.SPAN_DRAFTED: 4,
        names.SPAN_ACCEPTED: 2,
        names.SPAN_EMITTED: 3,
    }
    assert about(one) == told


def test_of_many_rounds_some_have_spans(trace: Trace) -> None:
    trace.decode(50)
    numbers = [about(span)[names.ROUND] for span in trace.spans(names.SPAN_ROUND)]
    assert numbers == [*range(1, FIRST + 1), EVERY, 2 * EVERY, 3 * EVERY]


def test_a_request_that_ends_has_its_queue_prefill_and_decode(trace: Trace) -> None:
    prefill = Traced(ENDED.request_id, PARENT, "prefill", fed=64, drafted=0, accepted=0, emitted=0)
    trace.steps.record(step(traced=(prefill,)))
    trace.steps.record(step(finished=(ENDED,)))
    queue, filled, decode = trace.spans()
    assert [queue.name, filled.name, decode.name] == [names.SPAN_QUEUE, names.SPAN_PREFILL, names.SPAN_DECODE]
    assert queue.start_time == NOW - 3 * NS and queue.end_time == filled.start_time == NOW - 11 * NS // 4
    assert filled.end_time == decode.start_time == NOW - 5 * NS // 2 and decode.end_time == NOW
    assert about(filled) == {names.INPUT_TOKENS: 100, names.CACHED_TOKENS: 64}
    assert about(decode) == {names.OUTPUT_TOKENS: 51, names.FINISH_REASONS: ("stop",), names.CAUSE: ""}


def test_each_sequence_of_a_request_ends_for_itself(trace: Trace) -> None:
    for index in range(2):
        trace.decode(1)
        trace.steps.record(step(finished=(replace(ENDED, index=index),)))
    assert len(trace.spans(names.SPAN_DECODE)) == 2


def test_requests_that_nobody_traces_cost_no_span(trace: Trace) -> None:
    trace.steps.record(step(finished=(ENDED,)))
    trace.decode(1, trace=DROPPED)
    assert trace.spans() == []


def test_a_malformed_parent_does_no_harm(trace: Trace) -> None:
    trace.decode(1, trace="nonsense")
    [one] = trace.spans(names.SPAN_ROUND)
    assert one.parent is None


def test_requests_that_never_end_are_forgotten(trace: Trace) -> None:
    for i in range(OPEN + 5):
        trace.decode(1, request_id=f"r{i}", trace=DROPPED)
    ends = tuple(replace(ENDED, request_id=f"r{i}") for i in range(OPEN + 5))
    assert len(trace.steps._open) == OPEN
    trace.steps.record(step(finished=ends))
    assert trace.steps._open == {}


def test_the_ingress_begins_the_trace(trace: Trace) -> None:
    with request_span(trace.tracer, "chat", "/v1/completions", "req-1") as traceparent:
        assert traceparent is not None
        trace.decode(1, trace=traceparent)
    request = trace.spans(names.SPAN_REQUEST)[0]
    assert about(request) == {names.TENANT: "chat", names.ROUTE: "/v1/completions", names.REQUEST_ID: "req-1"}
    assert parent_of(trace.spans(names.SPAN_ROUND)[0]) == span_id(request)


def test_the_ingress_goes_on_with_its_client_or_with_serve(trace: Trace) -> None:
    with request_span(trace.tracer, "chat", "/", "r", PARENT):
        pass
    with (
        trace.tracer.start_as_current_span("serve") as serve,
        request_span(trace.tracer, "c", "/", "r", PARENT),
    ):
        pass
    first, second = trace.spans(names.SPAN_REQUEST)
    assert parent_of(first) == int(PARENT.split("-")[2], 16)
    assert parent_of(second) == serve.get_span_context().span_id


def test_what_is_not_sampled_is_not_traced_any_further(trace: Trace) -> None:
    with request_span(trace.tracer, "chat", "/", "r", DROPPED) as traceparent:
        assert traceparent is None
    assert trace.spans() == []


def test_an_error_quotes_nothing_in_the_span(trace: Trace) -> None:
    with pytest.raises(ValueError), request_span(trace.tracer, "chat", "/", "r"):
        raise ValueError("the prompt")
    [request] = trace.spans()
    assert not request.events and "prompt" not in request.to_json()


def test_serve_is_told_by_variables() -> None:
    assert environment(Telemetry(otlp_endpoint="http://127.0.0.1:1")) == {}
    assert environment(Telemetry(trace_ratio=1.0)) == {}
    told = environment(Telemetry(otlp_endpoint="http://127.0.0.1:1", trace_ratio=0.25))
    assert told["RAY_SERVE_TRACING_SAMPLING_RATIO"] == "0.25"
    assert told["RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH"] == "gammaray.telemetry.tracing:span_processors"


def test_serve_takes_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the very function that loads it in proxies and replicas."""
    from ray.serve._private.tracing_utils import _load_span_processors

    told = environment(Telemetry(otlp_endpoint="http://127.0.0.1:1", trace_ratio=1.0))
    monkeypatch.setenv(ENDPOINT, told[ENDPOINT])
    [processor] = _load_span_processors(told["RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH"], "unused")
    processor.shutdown()


def test_spans_of_a_whole_request_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENDPOINT, raising=False)
    assert span_processors() == []
    with receiver() as collector:
        monkeypatch.setenv(ENDPOINT, collector.endpoint)
        made = provider(span_processors())
        tracer = made.get_tracer("test")
        steps = StepSpans(tracer, lambda: NOW)
        with request_span(tracer, "chat", "/v1/completions", "req-1") as traceparent:
            assert traceparent is not None
            part = Traced(ENDED.request_id, traceparent, "decode", fed=5, drafted=4, accepted=2, emitted=3)
            steps.record(step(traced=(part,), finished=(ENDED,)))
        made.shutdown()
    spans = {span.name: span for span in collector.spans}
    root = spans[names.SPAN_REQUEST]
    middle = (names.SPAN_QUEUE, names.SPAN_PREFILL, names.SPAN_DECODE, names.SPAN_ROUND)
    assert {spans[name].parent_span_id for name in middle} == {root.span_id}
    assert {spans[name].parent_span_id for name in PHASES} == {spans[names.SPAN_ROUND].span_id}
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    assert len(collector.spans) == 9
