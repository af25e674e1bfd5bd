"""What a step tells telemetry: counts and times, never a token id."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gammaray.engine.profile import StepProfile
from gammaray.engine.round import Round
from gammaray.engine.scheduler import Schedule, Scheduler, Slice
from gammaray.engine.sequence import Sequence as Seq
from gammaray.engine.tally import Tally
from gammaray.types import Finished, FinishReason, Key, KeyCounts, Quality, Reuse, StepReport, Traced

NOTHING = Reuse()
Phase = Literal["schedule", "draft", "verify", "commit"]
Cost = tuple[float, float]  # T0, dT: see KeyCounts


@dataclass(slots=True)
class Told:
    """What a step gathers for its report."""

    tallies: dict[Key, Tally] = field(default_factory=lambda: defaultdict(Tally))
    costs: dict[Key, Cost] = field(default_factory=dict)
    finished: list[Finished] = field(default_factory=list)
    traced: list[Traced] = field(default_factory=list)
    drafter_failures: int = 0
    biased: frozenset[str] = frozenset()  # see Trimmed; by rid
    trimmed_nodes: int = 0
    target_reuse: Reuse = NOTHING
    draft_reuse: Reuse = NOTHING


class Watch:
    """Seconds of a step by phase; a phase may come in several parts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self.began = clock, clock()
        self._last = self.began
        self.seconds: dict[Phase, float] = defaultdict(float)

    def end(self, phase: Phase) -> None:
        """What passed since the last end was this phase."""
        now = self._clock()
        self.seconds[phase] += now - self._last
        self._last = now


def round_key(part: Slice) -> Key:
    """What a round counts for: that of plain decoding, if no draft was asked for."""
    tenant, request_class, drafter = part.sequence.key
    return tenant, request_class, drafter if part.depth > 0 else None


def costs(done: Round, draft_s: Mapping[str, float], profile: StepProfile | None) -> dict[Key, Cost]:
    """By key, T0 and dT of this step (math.md section 4, step speed-up); nothing without a profile.

    A drafter's time is shared by the sequences that it drafted for.
    """
    if profile is None:
        return {}
    nodes, views = Counter[Key](), Counter[Key]()
    for part in done.slices:
        if part.depth > 0:
            views[round_key(part)] += 1
            nodes[round_key(part)] += len(done.trees.get(part.sequence.rid, ()))
    fed = sum(part.pending for part in done.slices) + nodes.total()
    asked = Counter[str]()
    for (_, _, drafter), count in views.items():
        asked[drafter or ""] += count
    whole = profile.seconds(fed) if fed else 0.0
    found = {}
    for key, count in views.items():
        base = profile.seconds(fed - nodes[key])
        drafting = draft_s.get(key[2] or "", 0.0) * count / asked[key[2] or ""]
        found[key] = base, whole - base + drafting
    return found


def finished(sequence: Seq, reason: FinishReason, now: float, found: Quality | None) -> Finished:
    """How a sequence went, now that it has ended and its last chunk is made."""
    request, begun = sequence.request, sequence.started if sequence.started is not None else now
    first = sequence.first_token if sequence.first_token is not None else now
    return Finished(
        *sequence.key,
        state=request.plan.state,
        shadow=request.plan.shadow,
        reason=reason,
        fallback=sequence.fallback,
        index=sequence.index,
        prompt_tokens=len(request.prompt),
        cached_tokens=sequence.cached_tokens,
        output_tokens=sequence.delivered,  # as its client counts them
        stats=(sequence.shadow if request.plan.shadow else sequence.tally).stats(),
        preemptions=sequence.preemptions,
        queued_s=begun - sequence.submitted,
        first_s=first - sequence.submitted,
        total_s=now - sequence.submitted,
        forecast=request.forecast,
        quality=found,
        request_id=_shown(request.request_id),
    )


def _shown(request_id: str) -> str:
    """As the ingress knows it: without what makes it unique here."""
    return request_id.partition("#")[0]


def traced(part: Slice, done: Round, kept: int) -> Traced:
    sequence = part.sequence
    rid, verdict = sequence.rid, done.verdicts[sequence.rid]
    return Traced(
        request_id=_shown(sequence.request.request_id),
        trace=sequence.request.trace or "",
        phase="decode" if part.pending == 1 else "prefill",
        fed=part.pending,
        drafted=done.drafted.get(rid, 0),
        accepted=min(kept, len(verdict.path)),
        emitted=kept,
    )


def report(
    step: int, scheduler: Scheduler, schedule: Schedule, done: Round, told: Told, watch: Watch
) -> StepReport:
    """After the commit."""
    running = Counter(sequence.key for sequence in scheduler.running)
    spent = watch.seconds
    pool = scheduler.cache.pool
    return StepReport(
        step=step,
        running=len(scheduler.running),
        waiting=scheduler.waiting,
        prefill_tokens=sum(part.pending for part in schedule.slices if part.pending > 1),
        verified_nodes=sum(map(len, done.trees.values())),
        kv_used_blocks=pool.used,
        kv_total_blocks=pool.num_blocks,
        preempted=len(schedule.preempted),
        kv_shrunk=schedule.kv_shrunk,
        trimmed_nodes=told.trimmed_nodes,
        drafter_failures=told.drafter_failures,
        schedule_s=spent["schedule"],
        draft_s=spent["draft"],
        verify_s=spent["verify"],
        commit_s=spent["commit"],
        counts=tuple(_counts(key, tally, running[key], told.costs) for key, tally in told.tallies.items()),
        finished=tuple(told.finished),
        traced=tuple(told.traced),
        target_reuse=told.target_reuse,
        draft_reuse=told.draft_reuse,
    )


def _counts(key: Key, tally: Tally, running: int, found: Mapping[Key, Cost]) -> KeyCounts:
    stats, (base, extra) = tally.stats(), found.get(key, (0.0, 0.0))
    return KeyCounts(*key, running, stats, stats.rounds * base, stats.rounds * extra)
