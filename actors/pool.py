"""The keeper of the draft workers: carries out what routing/pools.py decides, round by round.

It may be lost at any time. Its order and its memory are in Ray's KV, the workers are named and live on, and a
keeper that starts again finds all of them. Requests do not need it: target replicas keep the addresses that
they heard last.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gammaray.actors.crew import Order
from gammaray.actors.draft import Post, Report
from gammaray.actors.place import misplaced
from gammaray.routing.pools import Drain, Phase, PoolLimits, PoolState, Start, Stop, WorkerStats, decide

logger = logging.getLogger(__name__)

SILENT_S = 15.0  # a worker that once answered and is silent for so long is lost

Pool = tuple[str, str]  # tenant, drafter


class Crew(Protocol):
    """The workers, by Post.name: see RayCrew."""

    def names(self) -> set[str]:
        """Of all that there are."""
        ...

    def start(self, post: Post, order: Order) -> None:
        """Without waiting for it."""
        ...

    def ask(self, names: set[str]) -> dict[str, Report | Exception]:
        """Those that answer in a moment, or are dead."""
        ...

    def drain(self, name: str) -> None:
        """It takes no new sequences."""
        ...

    def kill(self, name: str) -> None:
        """At once."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """What a keeper that starts again must know."""

    states: Mapping[Pool, PoolState] = field(default_factory=dict)
    posts: Mapping[str, Post] = field(default_factory=dict)  # of the workers that it started, by name


@dataclass(slots=True)
class Member:
    """A worker. Times are of the keeper's clock."""

    post: Post
    heard: float  # its last answer; before the first: when it was met
    report: Report | None = None
    lost: str | None = None  # why

    def stats(self) -> WorkerStats:
        if self.report is None or self.lost:
            return WorkerStats(self.post.name, self.post.version, "lost" if self.lost else "starting")
        phase: Phase = "draining" if self.report.draining else "ready"
        load = self.report.load
        return WorkerStats(self.post.name, self.post.version, phase, load.busy, load.queued, load.sequences)


class Keeper:
    """`tick` is one round. In between, `reports` and `troubles` may be read from any thread.

    `remember` keeps the memory outside, before anything is done that depends on it. `clock` in seconds, also
    comparable with an earlier keeper's on another machine.
    """

    def __init__(
        self,
        crew: Crew,
        memory: Memory = Memory(),
        remember: Callable[[Memory], None] = lambda memory: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._crew, self._memory, self._remember, self._clock = crew, memory, remember, clock
        found = crew.names()
        self._members = {name: Member(memory.posts[name], clock()) for name in found & memory.posts.keys()}
        for name in found - memory.posts.keys():
            crew.kill(name)
        self.reports: Mapping[Pool, tuple[Report, ...]] = {}  # of all that draft; some may be draining
        self.troubles: Mapping[str, str] = {}  # by worker: why it was lost the last time
        self._losses: Counter[str] = Counter()

    def tick(self, order: Order) -> None:
        now = self._clock()
        self._listen(now)
        pools: dict[Pool, list[Post]] = {}
        for post in order.posts:
            pools.setdefault(post.pool, []).append(post)
        for pool, posts in pools.items():
            self._manage(pool, posts, order, now)
        for name in [name for name, member in self._members.items() if member.post.pool not in pools]:
            self._stop(name)
        self.reports = {pool: self._reports(pool) for pool in pools}

    def _listen(self, now: float) -> None:
        asked = {name: member for name, member in self._members.items() if not member.lost}
        answers = self._crew.ask(set(asked))
        for name, member in asked.items():
            answer = answers.get(name)
            if isinstance(answer, Report):
                member.heard, member.report = now, answer
                if reason := misplaced(member.post.place, answer.where):
                    self._lose(member, reason)
            elif isinstance(answer, Exception):
                self._lose(member, f"{type(answer).__name__}: {answer}")
            elif member.report and now - member.heard > SILENT_S:
                self._lose(member, f"it was silent for {SILENT_S:.0f} s")

    def _lose(self, member: Member, reason: str) -> None:
        """The next decision ends it."""
        name = member.post.name
        member.lost = reason
        self._losses[name] += 1
        self.troubles = {**self.troubles, name: reason}
        logger.warning("lost %s: %s", name, reason)

    def _manage(self, pool: Pool, posts: Sequence[Post], order: Order, now: float) -> None:
        members = [member.stats() for member in self._members.values() if member.post.pool == pool]
        limits = PoolLimits(min(order.config.tenants[pool[0]].pool.workers, len(posts)), len(posts))
        before = self._memory.states.get(pool, PoolState())
        state, actions = decide(before, members, limits, posts[0].version, now)
        starts = [
            post for action in actions if isinstance(action, Start) for post in self._free(action, posts)
        ]
        self._keep({**self._memory.states, pool: state}, starts)
        for action in actions:
            if isinstance(action, Stop):
                self._stop(action.id)
            elif isinstance(action, Drain):
                self._crew.drain(action.id)
        for post in starts:
            self._start(post, order, now)

    def _free(self, start: Start, posts: Sequence[Post]) -> list[Post]:
        """Where to start: posts that lost a worker more than once come last, the GPU may be broken.

        Only the version of the order can be started.
        """
        free = [post for post in posts if post.name not in self._members and post.version == start.version]
        return sorted(free, key=lambda post: (self._losses[post.name] > 1, post.worker))[: start.count]

    def _keep(self, states: Mapping[Pool, PoolState], starts: Sequence[Post]) -> None:
        posts = {name: member.post for name, member in self._members.items()}
        memory = Memory(states, posts | {post.name: post for post in starts})
        if memory != self._memory:
            self._memory = memory
            self._remember(memory)

    def _start(self, post: Post, order: Order, now: float) -> None:
        member = self._members[post.name] = Member(post, now)
        try:
            self._crew.start(post, order)
        except Exception as error:  # Ray may still know the dead one's name
            self._lose(member, f"{type(error).__name__}: {error}")

    def _stop(self, name: str) -> None:
        self._crew.kill(name)
        self._members.pop(name, None)

    def _reports(self, pool: Pool) -> tuple[Report, ...]:
        members = sorted(self._members.values(), key=lambda member: member.post.worker)
        return tuple(m.report for m in members if m.post.pool == pool and m.report and not m.lost)
