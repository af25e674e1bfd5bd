"""The keeper as an actor, how it is hired and dismissed, and how a target replica hears from it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray

from gammaray.actors.crew import MEMORY, NAMESPACE, ORDER, Order, RayCrew, get, put
from gammaray.actors.draft import Report
from gammaray.actors.place import whereabouts
from gammaray.actors.pool import Keeper, Memory, Pool

if TYPE_CHECKING:
    from gammaray.actors.link.pool import Member

logger = logging.getLogger(__name__)

NAME = "keeper"
ROUND_S = 0.5
POLL_S = 1.0  # of the addresses


class KeeperActor:
    """Its rounds run in a thread, so that questions are answered at once."""

    def __init__(self) -> None:
        memory: Memory = get(MEMORY) or Memory()
        self._keeper = Keeper(RayCrew(), memory, lambda memory: put(MEMORY, memory))
        threading.Thread(target=self._rounds, daemon=True).start()

    def _rounds(self) -> None:
        while True:
            try:
                if order := get(ORDER):
                    self._keeper.tick(order)
            except Exception:  # of Ray's, for a while
                logger.exception("a round of the keeper failed")
            time.sleep(ROUND_S)

    def reports(self) -> Mapping[Pool, tuple[Report, ...]]:
        """Of each pool the workers that draft, also those that take no new sequences."""
        return self._keeper.reports

    def troubles(self) -> Mapping[str, str]:
        """Why a worker was lost the last time."""
        return self._keeper.troubles


def hire(order: Order) -> Any:
    """The handle of a new keeper that carries out `order`. Another order is given by `put(ORDER, ...)`."""
    dismiss()
    put(ORDER, order)
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(KeeperActor)
    return actor.options(name=NAME, namespace=NAMESPACE, lifetime="detached").remote()


def dismiss() -> None:
    """Ends the keeper and every draft worker, if there are any."""
    with suppress(ValueError):
        ray.kill(ray.get_actor(NAME, NAMESPACE))
    crew = RayCrew()
    for name in crew.names():
        crew.kill(name)
    put(ORDER, None)
    put(MEMORY, None)


class Resolver:
    """Draft workers as the keeper told them last. Safe to call from any thread."""

    def __init__(self, replica: int) -> None:
        """`replica`: the target replica that asks."""
        self._replica, self._node = replica, whereabouts().node
        self._reports: Mapping[Pool, tuple[Report, ...]] = {}
        threading.Thread(target=self._poll, daemon=True).start()

    def __call__(self, tenant: str, drafter: str) -> list[Member]:
        """Nearest are those that the plan put beside this replica, then come those of its node."""
        from gammaray.actors.link.pool import Member  # only here, as it imports torch

        reports = self._reports.get((tenant, drafter), ())
        return [Member(report.address, self._distance(report), report.draining) for report in reports]

    def _distance(self, report: Report) -> int:
        if report.post.near == self._replica:
            return 0
        return 1 if report.where.node == self._node else 2

    def _poll(self) -> None:
        while True:
            with suppress(Exception):  # no keeper at the moment: the workers are where they were
                call: ray.ObjectRef[Mapping[Pool, tuple[Report, ...]]]
                call = ray.get_actor(NAME, NAMESPACE).reports.remote()
                self._reports = ray.get(call, timeout=POLL_S)
            time.sleep(POLL_S)
