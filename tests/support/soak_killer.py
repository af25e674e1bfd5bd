"""Who kills at random in the soak, and how the replicas are meanwhile."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from random import Random

import psutil

from gammaray.types import Health

from . import raylets

WORKER, REPLICA, KEEPER = "ray::DraftWorker", "ray::ServeReplica:gammaray:target", "ray::KeeperActor"
BAG = {"worker killed": 3, "worker stopped": 3, "keeper killed": 1, "replica killed": 1, "node lost": 1}
PAUSES_S = (0.5, 4.0)  # between two faults, at least and at most
STOPS_S = (0.2, 1.0, 4.0)  # how long a worker is stopped: late, later, and given up
DOWN_S = (0.0, 5.0)  # how long a node is away, at least and at most
ANSWER_S = 5.0  # for a replica to say how it is


class Replicas:
    """Of the application that this process has started."""

    def __init__(self, count: int) -> None:
        from ray import serve

        self._handles = [serve.get_deployment_handle(f"target-{i}", "gammaray") for i in range(count)]
        self._last = [(0, 0)] * count  # drafts and hits, as it told them last
        self._before = Counter[int]()  # drafts (0) and hits (1) of those that are gone

    def health(self) -> list[Health | None]:
        """None: that one does not answer."""
        return [self._ask(number) for number in range(len(self._handles))]

    def all_up(self) -> bool:
        return all(health is not None and health.state == "ok" for health in self.health())

    @property
    def drafts(self) -> int:
        return self._before[0] + sum(drafts for drafts, _ in self._last)

    @property
    def hits(self) -> int:
        return self._before[1] + sum(hits for _, hits in self._last)

    def _ask(self, number: int) -> Health | None:
        try:
            health: Health = self._handles[number].health.remote().result(timeout_s=ANSWER_S)
        except Exception:  # Ray's, of several kinds
            return None
        counts = sum(link.drafts for link in health.links), sum(link.hits for link in health.links)
        if counts[0] < self._last[number][0]:  # another process
            self._before.update(dict(enumerate(self._last[number])))
        self._last[number] = counts
        return health


class Killer:
    """Faults in an order and at times that the seed decides; each kind comes again and again.

    A replica goes, alone or with its node, only while all of them answer.
    """

    def __init__(
        self, seed: int, nodes: raylets.Raylets, lost: Mapping[str, int], replicas: Replicas
    ) -> None:
        """`lost`: the nodes that may be, and how many GPUs each has."""
        self.done = Counter[str]()
        self._draws = Random(seed)
        self._nodes, self._lost, self._replicas = nodes, dict(lost), replicas
        self._over = threading.Event()
        self._kinds: Mapping[str, Callable[[], bool]] = {
            "worker killed": self._kill_worker,
            "worker stopped": self._stop_worker,
            "keeper killed": self._kill_keeper,
            "replica killed": self._kill_replica,
            "node lost": self._lose_node,
        }

    def run(self) -> None:
        """Until `stop`; leaves everything running."""
        bag: list[str] = []
        while not self._over.wait(self._draws.uniform(*PAUSES_S)):
            if not bag:
                bag = [kind for kind, count in BAG.items() for _ in range(count)]
                self._draws.shuffle(bag)
            self._replicas.health()  # counts drafts before they are lost
            if kind := next((kind for kind in dict.fromkeys(bag) if self._kinds[kind]()), None):
                bag.remove(kind)
                self.done[kind] += 1
                print(f"{time.strftime('%H:%M:%S')} {kind}", flush=True)

    @property
    def has_done_all(self) -> bool:
        return self.done.keys() == BAG.keys()

    def stop(self) -> None:
        self._over.set()

    # Each tells whether it could ----------------------------------------------------------------------

    def _kill_worker(self) -> bool:
        return self._kill(raylets.processes(WORKER))

    def _kill_keeper(self) -> bool:
        return self._kill(raylets.processes(KEEPER))

    def _kill_replica(self) -> bool:
        return self._replicas.all_up() and self._kill(raylets.processes(REPLICA))

    def _kill(self, found: Sequence[psutil.Process]) -> bool:
        if not found:
            return False
        with suppress(psutil.NoSuchProcess):
            self._draws.choice(found).kill()
        return True

    def _stop_worker(self) -> bool:
        if not (found := raylets.processes(WORKER)):
            return False
        with suppress(psutil.NoSuchProcess):
            worker = self._draws.choice(found)
            worker.suspend()
            self._over.wait(self._draws.choice(STOPS_S))
            worker.resume()
        return True

    def _lose_node(self) -> bool:
        if not self._replicas.all_up():
            return False
        name = self._draws.choice(sorted(self._lost))
        self._nodes.kill(name)
        self._over.wait(self._draws.uniform(*DOWN_S))
        self._nodes.add(name, self._lost[name])
        return True
