"""What a replica's engine did, as metrics: a listener of its StepReports."""

from __future__ import annotations

from gammaray.telemetry import names
from gammaray.telemetry.labels import KeyLabels, Labels
from gammaray.telemetry.meters import Meters
from gammaray.telemetry.requests import Requests
from gammaray.telemetry.tables import Table
from gammaray.types import Cause, Finished, KeyCounts, PolicySnapshot, Reuse, SpeculationStats, StepReport


class Recorder:
    """One thread calls `record`; it costs some microseconds a key, as instruments are only touched later."""

    def __init__(self, meters: Meters, labels: Labels, model: str) -> None:
        """`model`: as clients name it."""
        self._labels = labels
        self._policy = PolicySnapshot()
        self._spec = Table(meters, names.KEY, names.SPEC)
        self._planned = Table(meters, names.KEY, [names.PLANNED])
        self._fallbacks = Table(meters, (*names.KEY, names.CAUSE), [names.FALLBACKS])
        self._finished = Table(meters, (*names.KEY, names.REASON), [names.FINISHED])
        self._engine = Table(meters, (), names.ENGINE)
        self._phases = Table(meters, (names.PHASE,), [names.PHASE_TIME])
        self._reuse = Table(meters, (names.MEMORY,), names.REUSE)
        self._load = Table(meters, (), names.LOAD)
        self._kv = Table(meters, (names.MEMORY,), names.KV)
        self._requests = Requests(meters, model)

    def apply(self, policy: PolicySnapshot) -> None:
        """Rounds count for the state that this gives their key. From any thread."""
        self._policy = policy

    def record(self, report: StepReport) -> None:
        self._record_engine(report)
        policy = self._policy
        for part in report.counts:
            self._count(part, policy.of(part.key).state)
        for ended in report.finished:
            self._end(ended)

    def _record_engine(self, report: StepReport) -> None:
        self._engine.add(
            (),
            1,
            report.prefill_tokens,
            report.preempted,
            report.kv_shrunk,
            report.drafter_failures,
            report.trimmed_nodes,
        )
        self._phases.add(("draft",), report.draft_s)
        self._phases.add(("verify",), report.verify_s)
        self._phases.add(("schedule",), report.schedule_s)
        self._phases.add(("state",), report.commit_s)
        self._add_reuse("target", report.target_reuse)
        self._add_reuse("draft", report.draft_reuse)
        self._load.replace({(): [report.running, report.waiting]})
        self._kv.replace({("target",): [report.kv_used_blocks, report.kv_total_blocks]})

    def _add_reuse(self, memory: str, reuse: Reuse) -> None:
        if reuse.seen:
            self._reuse.add((memory,), reuse.seen, reuse.reused)

    def _count(self, part: KeyCounts, state: str) -> None:
        labels = self._labels.key(part.tenant, part.request_class, part.drafter, state)
        _add(self._spec.row(labels), part.stats)

    def _end(self, ended: Finished) -> None:
        labels = self._labels.key(ended.tenant, ended.request_class, ended.drafter, ended.state)
        self._finished.add((*labels, ended.reason), 1)
        if ended.drafter is not None and not ended.shadow:
            self._plan(labels, ended.fallback)
        self._requests.add(labels, ended)

    def _plan(self, labels: KeyLabels, fallback: Cause | None) -> None:
        """Causes that did not come are there as zeros: a rate needs something to grow from."""
        self._planned.add(labels, 1)
        for cause in names.CAUSES:
            self._fallbacks.add((*labels, cause), cause == fallback)


def _add(row: list[float], stats: SpeculationStats) -> None:
    """In the order of names.SPEC, one by one: a loop takes twice as long, and this is most of the cost."""
    row[0] += stats.rounds
    row[1] += stats.drafted
    row[2] += stats.verified
    row[3] += stats.accepted
    row[4] += stats.emitted
    row[5] += stats.tested
    row[6] += stats.first_accepted
    row[7] += sum(stats.level_accepted)
