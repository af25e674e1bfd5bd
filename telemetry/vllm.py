"""The counts under the names of vLLM, for tools that know those: Prometheus only, as OTLP has no colons."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

from gammaray.telemetry.exposition import family
from gammaray.telemetry.meters import Meters
from gammaray.telemetry.names import INSTANCE, REASONS
from gammaray.types import FinishReason, StepReport

ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
DRAFTS, DRAFTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total"
PROMPT, GENERATED = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
SEEN, REUSED = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
PREEMPTED = "vllm:num_preemptions_total"
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USED = "vllm:kv_cache_usage_perc"
COUNTERS = {
    DRAFTS: "Rounds whose draft was verified",
    DRAFTED: "Draft tokens proposed",
    ACCEPTED: "Draft tokens accepted",
    PROMPT: "Prompt tokens of requests that ended",
    GENERATED: "Output tokens of requests that ended",
    PREEMPTED: "Requests that gave their KV back and wait again",
    SEEN: "Prompt tokens whose KV could have been kept",
    REUSED: "Prompt tokens whose KV had been kept",
}
GAUGES = {
    RUNNING: "Sequences that run",
    WAITING: "Sequences that wait",
    KV_USED: "Share of the KV blocks in use, 0 to 1",
}


class VllmNames:
    """A second listener of the engine's reports."""

    def __init__(self, meters: Meters, model: str) -> None:
        self._labels = {"model_name": model, "engine": "0", INSTANCE: meters.instance}
        self._lock = threading.Lock()
        self._counts, self._gauges = Counter[str](), dict.fromkeys(GAUGES, 0.0)
        self._positions, self._reasons = Counter[int](), Counter[FinishReason]()
        meters.also(self.text)

    def record(self, report: StepReport) -> None:
        with self._lock:
            self._count(report)
            for ended in report.finished:
                self._counts[PROMPT] += ended.prompt_tokens if ended.index == 0 else 0
                self._counts[GENERATED] += ended.output_tokens
                self._reasons[ended.reason] += 1
            self._gauges = {
                RUNNING: report.running,
                WAITING: report.waiting,
                KV_USED: report.kv_used_blocks / max(report.kv_total_blocks, 1),
            }

    def _count(self, report: StepReport) -> None:
        counts = self._counts
        counts[PREEMPTED] += report.preempted
        counts[SEEN] += report.target_reuse.seen
        counts[REUSED] += report.target_reuse.reused
        for stats in (part.stats for part in report.counts):
            counts[DRAFTS] += sum(stats.tries[:1])
            counts[DRAFTED] += stats.drafted
            counts[ACCEPTED] += stats.accepted
            self._positions.update(dict(enumerate(stats.hits)))

    def text(self) -> str:
        with self._lock:
            return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        for name, text in COUNTERS.items():
            yield from family(name, "counter", text, [(self._labels, self._counts[name])])
        for name, text in GAUGES.items():
            yield from family(name, "gauge", text, [(self._labels, self._gauges[name])])
        positions = [(self._labels | {"position": str(i)}, n) for i, n in sorted(self._positions.items())]
        yield from family(PER_POSITION, "counter", "Accepted, by place in the draft", positions)
        reasons = [(self._labels | {"finished_reason": one}, self._reasons[one]) for one in REASONS]
        yield from family("vllm:request_success_total", "counter", "Requests that ended", reasons)
