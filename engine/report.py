"""What a step tells telemetry: counts and times, never a token id."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gammaray.engine.profile import StepProfile
from gammaray.engine.round import Round
from gammaray.engine.scheduler import Schedule, Scheduler, Slice
from gammaray.engine.sequence import Sequence as Seq
from gammaray.engine.tally import Tally
from gammaray.types import Finished, FinishReason, Key, KeyCounts, Quality, Reuse, StepReport, Traced

NOTHING = Reuse()
Cost = tuple[float, float]  # T0, dT: see KeyCounts


@dataclass(slots=True)
class Told:
    """What a step gathers for its report."""

    tallies: dict[Key, Tally] = field(default_factory=lambda: defaultdict(Tally))
    costs: dict[Key, Cost] = field(default_factory=dict)
    finished: list[Finished] = field(default_factory=list)
    traced: list[Traced] = field(default_factory=list)
    drafter_failures: int = 0
    target_reuse: Reuse = NOTHING
    draft_reuse: Reuse = NOTHING


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
    step: int, scheduler: Scheduler, schedule: Schedule, done: Round, told: Told, marks: Sequence[float]
) -> StepReport:
    """After the commit. `marks` (s): begin, then the ends of schedule, draft, verify and commit."""
    running = Counter(sequence.key for sequence in scheduler.running)
    schedule_s, draft_s, verify_s, commit_s = (after - before for before, after in pairwise(marks))
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
        drafter_failures=told.drafter_failures,
        schedule_s=schedule_s,
        draft_s=draft_s,
        verify_s=verify_s,
        commit_s=commit_s,
        counts=tuple(_counts(key, tally, running[key], told.costs) for key, tally in told.tallies.items()),
        finished=tuple(told.finished),
        traced=tuple(told.traced),
        target_reuse=told.target_reuse,
        draft_reuse=told.draft_reuse,
    )


def _counts(key: Key, tally: Tally, running: int, found: Mapping[Key, Cost]) -> KeyCounts:
    stats, (base, extra) = tally.stats(), found.get(key, (0.0, 0.0))
    return KeyCounts(*key, running, stats, stats.rounds * base, stats.rounds * extra)
