"""Spans of traced requests in a replica, made afterwards from the reports of the engine's steps.

request (ingress) -> queue, prefill, decode, and some rounds -> schedule, draft, verify, accept
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from opentelemetry.context import Context
from opentelemetry.trace import Tracer, set_span_in_context
from opentelemetry.util.types import Attributes

from gammaray.telemetry import names
from gammaray.telemetry.tracing import context_of
from gammaray.types import Finished, StepReport, Traced

FIRST, EVERY = 4, 16  # the first rounds of a request have spans, then one in so many
OPEN = 1000  # requests that are followed; of more, the oldest are forgotten
NS = 1_000_000_000
PHASES = (names.SPAN_SCHEDULE, names.SPAN_DRAFT, names.SPAN_VERIFY, names.SPAN_ACCEPT)


@dataclass(slots=True)
class _Open:
    context: Context  # the ingress's span
    rounds: int = 0


class StepSpans:
    """One thread calls `record` right after each step. Without traced requests that costs nothing."""

    def __init__(self, tracer: Tracer, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracer, self._clock_ns = tracer, clock_ns
        self._open: dict[str, _Open] = {}

    def record(self, report: StepReport) -> None:
        if not (report.traced or self._open):
            return
        now = self._clock_ns()
        for part in report.traced:
            self._follow(part, report, now)
        for ended in report.finished:
            if (request := self._open.pop(ended.request_id, None)) is not None:
                self._end(request, ended, now)

    def _follow(self, part: Traced, report: StepReport, now: int) -> None:
        request = self._open.get(part.request_id)
        if request is None:
            request = self._open[part.request_id] = _Open(context_of(part.trace))
            if len(self._open) > OPEN:
                del self._open[next(iter(self._open))]
        if part.phase == "decode":
            request.rounds += 1
            if request.rounds <= FIRST or request.rounds % EVERY == 0:
                self._round(request, part, report, now)

    def _round(self, request: _Open, part: Traced, report: StepReport, now: int) -> None:
        """A step of the whole batch, as this request saw it."""
        seconds = (report.schedule_s, report.draft_s, report.verify_s, report.commit_s)
        marks = [now - int((sum(seconds) - mark) * NS) for mark in accumulate(seconds, initial=0.0)]
        about: Attributes = {
            names.ROUND: request.rounds,
            names.BATCH: report.running,
            names.SPAN_DRAFTED: part.drafted,
            names.SPAN_ACCEPTED: part.accepted,
            names.SPAN_EMITTED: part.emitted,
        }
        parent = self._span(names.SPAN_ROUND, request.context, marks[0], now, about)
        for name, (begin, end) in zip(PHASES, pairwise(marks), strict=True):
            self._span(name, parent, begin, end)

    def _end(self, request: _Open, ended: Finished, now: int) -> None:
        began = now - int(ended.total_s * NS)
        ran, first = (began + int(after * NS) for after in (ended.queued_s, ended.first_s))
        prompt: Attributes = {
            names.INPUT_TOKENS: ended.prompt_tokens,
            names.CACHED_TOKENS: ended.cached_tokens,
        }
        output: Attributes = {
            names.OUTPUT_TOKENS: ended.output_tokens,
            names.FINISH_REASONS: (ended.reason,),
            names.CAUSE: ended.fallback or "",
        }
        self._span(names.SPAN_QUEUE, request.context, began, ran)
        self._span(names.SPAN_PREFILL, request.context, ran, first, prompt)
        self._span(names.SPAN_DECODE, request.context, first, now, output)

    def _span(
        self,
        name: str,
        context: Context,
        begin: int,
        end: int,
        about: Attributes = None,
    ) -> Context:
        """One that is over; returns the context of its children."""
        span = self._tracer.start_span(name, context, attributes=about, start_time=begin)
        span.end(end)
        return set_span_in_context(span, context)
