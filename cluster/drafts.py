"""The draft workers of a layout, from the first start to the last end."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import ray

from gammaray.actors.crew import Order
from gammaray.actors.draft import LinkFactory, Post, Report, local_link
from gammaray.actors.keeper import dismiss, hire
from gammaray.actors.pool import Pool
from gammaray.config import Config
from gammaray.engine.threads import asked_threads
from gammaray.errors import ConfigError

POLL_S = 0.2


class Staff(Protocol):
    """What is asked of the keeper."""

    def reports(self) -> Mapping[Pool, Sequence[Report]]:
        """Of the workers that are up."""
        ...

    def troubles(self) -> Mapping[str, str]:
        """Why workers were lost, by name."""
        ...


class RayStaff:
    """The keeper that `hire` gave."""

    def __init__(self, order: Order) -> None:
        self._keeper = hire(order)

    def reports(self) -> Mapping[Pool, Sequence[Report]]:
        found: Mapping[Pool, Sequence[Report]] = ray.get(self._keeper.reports.remote())
        return found

    def troubles(self) -> Mapping[str, str]:
        found: Mapping[str, str] = ray.get(self._keeper.troubles.remote())
        return found


class NoStaff:
    """No drafter has workers of its own."""

    def reports(self) -> Mapping[Pool, Sequence[Report]]:
        return {}

    def troubles(self) -> Mapping[str, str]:
        return {}


@contextmanager
def working(config: Config, posts: Sequence[Post], link_factory: LinkFactory | None) -> Iterator[Staff]:
    """Workers start, and are kept until the end."""
    if not posts:
        yield NoStaff()
        return
    try:
        yield RayStaff(Order(config, tuple(posts), link_factory or local_link, asked_threads()))
    finally:
        dismiss()


def wait(
    staff: Staff, config: Config, posts: Sequence[Post], check: Callable[[], None], say: Callable[[str], None]
) -> None:
    """Until every pool has its workers, or one was lost: requests do without, and the keeper goes on trying.

    Raises ConfigError when a drafter cannot be served, and what `check` raises.
    """
    room = Counter(post.pool for post in posts)
    wanted = {pool: min(config.tenants[pool[0]].pool.workers, count) for pool, count in room.items()}
    while True:
        check()
        up = {pool: len(reports) for pool, reports in staff.reports().items()}
        if all(up.get(pool, 0) >= count for pool, count in wanted.items()):
            return
        if troubles := staff.troubles():
            _tell(troubles, say)
            return
        time.sleep(POLL_S)


def _tell(troubles: Mapping[str, str], say: Callable[[str], None]) -> None:
    for name, reason in troubles.items():
        if ours := re.findall(r"^gammaray\.errors\.\w+: (.+)$", reason, re.MULTILINE):
            raise ConfigError(ours[-1])
        say(f"warning: {name} was lost and is started again: {reason.strip().splitlines()[-1]}")
