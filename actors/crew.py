"""The draft workers as Ray actors: named and detached, so that they outlive whoever started them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.util import list_named_actors

from gammaray.actors.draft import DraftWorker, LinkFactory, Post, Report
from gammaray.config import Config

NAMESPACE = "gammaray"
PREFIX = "draft "  # of Post.name
ANSWER_S = 0.5  # for workers to answer
ORDER = b"gammaray draft workers: order"
MEMORY = b"gammaray draft workers: memory"


@dataclass(frozen=True, slots=True)
class Order:
    """The draft workers that may be, and what they serve."""

    config: Config
    posts: tuple[Post, ...]
    link_factory: LinkFactory
    threads: int | None = None  # of each worker; None: every usable core


class RayCrew:
    """Starts, asks and ends workers by name; keeps nothing that is not in Ray as well."""

    def __init__(self) -> None:
        self._calls: dict[str, ray.ObjectRef[Report]] = {}  # not answered yet

    def names(self) -> set[str]:
        """Of every worker that there is, also one that still starts."""
        every = list_named_actors(all_namespaces=True)
        return {a["name"] for a in every if a["namespace"] == NAMESPACE and a["name"].startswith(PREFIX)}

    def start(self, post: Post, order: Order) -> None:
        """Returns at once. A worker that dies stays dead: whoever watches decides when to try again."""
        actor = ray.remote(num_cpus=0, max_restarts=0)(DraftWorker)
        options: dict[str, Any] = {"name": post.name, "namespace": NAMESPACE, "lifetime": "detached"}
        options |= post.place.options()
        actor.options(**options).remote(order.config, post, order.link_factory, order.threads)

    def ask(self, names: set[str]) -> dict[str, Report | Exception]:
        """What those have to say that answer by now. An exception: the worker is dead, or broken."""
        answers: dict[str, Report | Exception] = {}
        for name in names - self._calls.keys():
            try:
                self._calls[name] = ray.get_actor(name, NAMESPACE).report.remote()
            except Exception as error:
                answers[name] = error
        calls = {call: name for name, call in self._calls.items()}
        done, _ = ray.wait([*calls], num_returns=len(calls), timeout=ANSWER_S) if calls else ([], [])
        for call in done:
            del self._calls[calls[call]]
            try:
                answers[calls[call]] = ray.get(call)
            except Exception as error:
                answers[calls[call]] = error
        return {name: answer for name, answer in answers.items() if name in names}

    def drain(self, name: str) -> None:
        with suppress(Exception):  # it is dead, which the next question will tell
            ray.get_actor(name, NAMESPACE).drain.remote()

    def kill(self, name: str) -> None:
        self._calls.pop(name, None)
        with suppress(Exception):
            ray.kill(ray.get_actor(name, NAMESPACE))


def put(key: bytes, value: object) -> None:
    """Into Ray's internal KV, which lives as long as the cluster. None: away with it."""
    if value is None:
        internal_kv._internal_kv_del(key)
    else:
        internal_kv._internal_kv_put(key, ray.cloudpickle.dumps(value), overwrite=True)


def get(key: bytes) -> Any:
    """None when there is nothing."""
    data = internal_kv._internal_kv_get(key)
    return ray.cloudpickle.loads(data) if data else None
