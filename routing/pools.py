"""What a tenant's draft pool should do next: size, drain, replacement, version switch. Pure decisions.

`decide` looks at the workers as they are now, so an action that came to nothing is given again. Whoever
carries the actions out promises two things:

- a worker is reported from the tick after its Start on, as starting, or as lost when that failed;
- it stays reported until it was told to Stop and has gone; its id may come back after a tick without it.

Workers that start or are ready number at most `size`, and one more while versions change (the surge): a
worker of the new version comes up before one of the old goes, so a switch takes no ready worker away. With
the draining ones they number at most `max_workers`, and the surge. A loss costs drafts, never requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

BUSY_HIGH, QUEUED_HIGH = 0.8, 4.0  # means over the ready workers; above one of them: one worker more
BUSY_LOW, QUEUED_LOW = 0.6, 2.0  # below both, as they would be with one worker less: one less
HIGH_TICKS = 2  # in a row
LOW_S = 120.0  # without a break
COOL_DOWN_S = 30.0  # after workers came or went the load needs some time to spread
DRAIN_LIMIT_S = 60.0  # then its sequences go on plainly and catch up elsewhere
START_LIMIT_S = 600.0  # a worker that is not ready by then has failed
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 60.0  # before a loss is replaced; doubles
STEADY_S = 900.0  # after so long without a loss (longer than a start lasts) the backoff begins anew
FAILED_STARTS = 3  # in a row; then a new version is given up


Phase = Literal["starting", "ready", "draining", "lost"]


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker as its pool sees it at a tick."""

    id: str
    version: str
    state: Phase
    busy: float = 0.0  # share of the last window that it computed
    queued: int = 0  # sequences or frames that wait for it
    sequences: int = 0  # attached


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """At least `workers`; at most `max_workers`, which is no less."""

    workers: int
    max_workers: int


@dataclass(frozen=True, slots=True)
class Start:
    version: str
    count: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Attach nothing new to it; the sequences that it has may end."""

    id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End it now and forget it."""

    id: str


Action = Start | Drain | Stop


@dataclass(frozen=True, slots=True)
class Seen:
    """What a worker is to the pool, and since when. A worker that leaves never comes back."""

    phase: Literal["starting", "ready", "leaving"]
    since: float


@dataclass(frozen=True, slots=True)
class Losses:
    """Of the workers of one version."""

    ticks: int  # that found some, since it was steady last
    at: float  # the last of them
    failed_starts: int  # workers that were never ready, in a row

    def over(self, now: float) -> bool:
        """Whether the next worker may start."""
        doublings = min(self.ticks - 1, 32)  # far beyond the longest backoff, far below an overflow
        return now >= self.at + min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**doublings)


@dataclass(frozen=True, slots=True)
class PoolState:
    """What must outlive a tick, and a restart of the controller."""

    size: int = 0  # workers that are wanted
    asked: str | None = None  # the version of the last tick
    serving: str | None = None  # of the workers that are ready, or last were; in a switch the old one
    given_up: str | None = None  # `asked`, if its workers do not start; `serving` stays. Ask anew to retry
    high_ticks: int = 0
    low_since: float | None = None
    unsettled_at: float | None = None  # the last tick at which workers came or went
    seen: Mapping[str, Seen] = field(default_factory=dict)  # by worker
    losses: Mapping[str, Losses] = field(default_factory=dict)  # by version

    @property
    def wanted(self) -> str | None:
        """The version that workers shall have."""
        return self.serving if self.given_up is not None else self.asked

    def those(self, stats: Sequence[WorkerStats], *phases: str) -> list[WorkerStats]:
        return [worker for worker in stats if self.seen[worker.id].phase in phases]


def decide(
    state: PoolState, stats: Sequence[WorkerStats], limits: PoolLimits, version: str, now: float
) -> tuple[PoolState, tuple[Action, ...]]:
    """One tick of a pool that shall run `version`. `now` in seconds, on any clock that only goes forward."""
    state = _ask(state, version)
    state = _observe(state, stats, now)
    state = _judge(state, stats)
    state = _resize(state, stats, limits, now)
    state = _dismiss(state, stats, now)
    partings = [action for w in stats if (action := _parting(w, state.seen[w.id], now))]
    return state, (*partings, *_starts(state, stats, limits, now))


def _ask(state: PoolState, version: str) -> PoolState:
    """Another version than the last time has its starts before it, whatever it did earlier."""
    if version == state.asked:
        return state
    losses = {name: found for name, found in state.losses.items() if name != version}
    return replace(state, asked=version, given_up=None, losses=losses)


def _observe(state: PoolState, stats: Sequence[WorkerStats], now: float) -> PoolState:
    """What became of each worker, and what was lost."""
    seen = {worker.id: _look(worker, state.seen.get(worker.id), now) for worker in stats}
    failed = [worker for worker in stats if _failed(worker, state.seen.get(worker.id), seen[worker.id])]
    ever_ready = {name for name, known in state.seen.items() if known.phase == "ready"}
    failed_starts = Counter(worker.version for worker in failed if worker.id not in ever_ready)
    losses = {name: found for name, found in state.losses.items() if now - found.at < STEADY_S}
    for name in {worker.version for worker in failed}:
        before = losses.get(name, Losses(0, now, 0))
        losses[name] = Losses(before.ticks + 1, now, before.failed_starts + failed_starts[name])
    return replace(state, seen=seen, losses=losses)


def _look(worker: WorkerStats, before: Seen | None, now: float) -> Seen:
    if before is not None and before.phase == "leaving":
        return before
    if worker.state == "starting" or worker.state == "ready":
        known = before if before is not None and before.phase == worker.state else Seen(worker.state, now)
        overdue = worker.state == "starting" and now - known.since >= START_LIMIT_S
        return Seen("leaving", now) if overdue else known
    return Seen("leaving", now)


def _failed(worker: WorkerStats, before: Seen | None, after: Seen) -> bool:
    """Just now, and not because it was told to go."""
    newly = after.phase == "leaving" and (before is None or before.phase != "leaving")
    return newly and worker.state != "draining"


def _judge(state: PoolState, stats: Sequence[WorkerStats]) -> PoolState:
    """Which version serves, and whether the one asked for ever will."""
    ready = Counter(worker.version for worker in state.those(stats, "ready"))
    losses = {
        name: replace(found, failed_starts=0) if name in ready else found
        for name, found in state.losses.items()
    }
    asked, serving = state.asked, state.serving
    if ready and serving not in ready:
        serving = max(ready, key=lambda name: (ready[name], name))
    tried = losses.get(asked or "")
    hopeless = tried is not None and tried.failed_starts >= FAILED_STARTS and serving not in (None, asked)
    return replace(state, losses=losses, serving=serving, given_up=asked if hopeless else state.given_up)


def _resize(state: PoolState, stats: Sequence[WorkerStats], limits: PoolLimits, now: float) -> PoolState:
    """At most one worker more or less, and only while nothing else moves."""
    size = max(limits.workers, min(state.size, limits.max_workers))
    ready = state.those(stats, "ready")
    moving = state.those(stats, "starting") or any(worker.version != state.wanted for worker in ready)
    if moving or len(ready) != size:
        return replace(state, size=size, high_ticks=0, low_since=None, unsettled_at=now)
    high = _load_above(ready, len(ready), BUSY_HIGH, QUEUED_HIGH)
    low = len(ready) > 1 and not _load_above(ready, len(ready) - 1, BUSY_LOW, QUEUED_LOW)
    ticks = state.high_ticks + 1 if high else 0
    since = None if not low else now if state.low_since is None else state.low_since
    step = int(ticks >= HIGH_TICKS) - int(since is not None and now - since >= LOW_S)
    resting = state.unsettled_at is not None and now - state.unsettled_at < COOL_DOWN_S
    resized = max(limits.workers, min(size + step, limits.max_workers))
    if resting or resized == size:
        return replace(state, size=size, high_ticks=ticks, low_since=since)
    return replace(state, size=resized, high_ticks=0, low_since=None, unsettled_at=now)


def _load_above(ready: Sequence[WorkerStats], workers: int, busy: float, queued: float) -> bool:
    """The load of these, spread over so many workers."""
    return (
        sum(worker.busy for worker in ready) > busy * workers
        or sum(worker.queued for worker in ready) > queued * workers
    )


def _dismiss(state: PoolState, stats: Sequence[WorkerStats], now: float) -> PoolState:
    """Those that are too many: first of other versions, then the ones with the fewest sequences."""

    def worth(worker: WorkerStats) -> tuple[bool, int, str]:
        return worker.version == state.wanted, worker.sequences, worker.id

    ready = sorted(state.those(stats, "ready"), key=worth)
    starting = sorted(state.those(stats, "starting"), key=worth)
    spare = ready[: max(0, len(ready) - state.size)]
    others = sum(worker.version != state.wanted for worker in starting)
    kept = sum(worker.version == state.wanted for worker in ready if worker not in spare)
    surplus = len(starting) - others + kept - state.size
    gone = spare + starting[: others + max(0, surplus)]
    return replace(state, seen={**state.seen, **{worker.id: Seen("leaving", now) for worker in gone}})


def _parting(worker: WorkerStats, seen: Seen, now: float) -> Action | None:
    """What a worker that leaves is told: drain first; stop when that is over, or when nothing is attached."""
    if seen.phase != "leaving":
        return None
    if worker.state in ("ready", "draining") and now - seen.since < DRAIN_LIMIT_S:
        if worker.state == "ready":
            return Drain(worker.id)
        return None if worker.sequences else Stop(worker.id)
    return Stop(worker.id)


def _starts(
    state: PoolState, stats: Sequence[WorkerStats], limits: PoolLimits, now: float
) -> Iterator[Start]:
    present = [worker for worker in stats if worker.state != "lost"]
    staying = state.those(present, "starting", "ready")
    surge = int(any(worker.version != state.wanted for worker in present))
    count = min(
        state.size - sum(worker.version == state.wanted for worker in staying),
        state.size + surge - len(staying),
        limits.max_workers + surge - len(present),
    )
    wanted = state.wanted
    if wanted is not None and count > 0 and (wanted not in state.losses or state.losses[wanted].over(now)):
        yield Start(wanted, count)
