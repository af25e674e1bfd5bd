"""What a step tells telemetry: counts and times, never a token id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from gammaray.engine.round import Round
from gammaray.engine.scheduler import Schedule, Scheduler
from gammaray.engine.sequence import Key
from gammaray.types import KeyCounts, SpeculationStats, StepReport


def report(
    step: int,
    scheduler: Scheduler,
    schedule: Schedule,
    done: Round,
    counts: Mapping[Key, SpeculationStats],
    drafter_failures: int,
    marks: Sequence[float],
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
        drafter_failures=drafter_failures,
        schedule_s=schedule_s,
        draft_s=draft_s,
        verify_s=verify_s,
        commit_s=commit_s,
        counts=tuple(KeyCounts(*key, running[key], stats) for key, stats in counts.items()),
    )
