"""What a declared application needs beside Serve; nearly all of it outlives the process that asked for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from gammaray.actors import controller, crew, keeper
from gammaray.actors.crew import NAMESPACE, put
from gammaray.actors.draft import LinkFactory
from gammaray.actors.line import NAME as CONTROLLER
from gammaray.actors.metrics import Exposure
from gammaray.actors.target import SLOTS
from gammaray.cluster import control, drafts
from gammaray.cluster.declaration import declaration
from gammaray.cluster.layout import Layout
from gammaray.cluster.lease import lease, release
from gammaray.cluster.moves import disturbed
from gammaray.cluster.nodes import Node, Probe
from gammaray.config import Config
from gammaray.engine.threads import asked_threads

KEPT = b"gammaray steward"  # in Ray's KV
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a steward that starts again must know."""

    args: Mapping[str, Any]  # as declared
    config: Config
    built: Layout  # as Serve was given it
    now: Layout
    homes: Mapping[str, str]  # see moves.homes
    probe: Probe
    link_factory: LinkFactory

    def staff(self) -> crew.Order:
        return crew.Order(self.config, self.now.posts, self.link_factory, asked_threads())


def acquire(kept: Kept, among: Sequence[Node], check: Callable[[], None], say: Say) -> None:
    """Waits for draft workers and the controller. What it raises leaves something held: see give_up."""
    layout, config = kept.now, kept.config
    _keep_slots(layout)
    lease(layout.gpus, among)
    if layout.posts:
        drafts.wait(drafts.RayStaff(kept.staff()), config, layout.posts, check, say)
    if config.controller.enabled:
        control.start(config, layout, declaration(kept.args).ingress.pool)


def give_up() -> None:
    """Also what an earlier application left behind."""
    keeper.dismiss()
    controller.dismiss()
    release()
    put(SLOTS, None)


def move(before: Kept, after: Kept, lost: set[str], among: Sequence[Node]) -> None:
    """From one layout to another of the same configuration; nodes that are `lost` hold nothing any more."""
    fresh = disturbed(before.now, after.now, lost)
    release(fresh)
    lease({name: gpus for name, gpus in after.now.gpus.items() if name in fresh}, among)
    _keep_slots(after.now)
    if after.now.posts:
        put(crew.ORDER, after.staff())
        workers, wanted = crew.RayCrew(), {post.name for post in after.now.posts}
        for name in workers.names() - wanted:
            workers.kill(name)  # the keeper starts it anew where it now belongs
    if after.config.controller.enabled:
        ray.get_actor(CONTROLLER, NAMESPACE).relocate.remote(after.now.outline)


def _keep_slots(layout: Layout) -> None:
    put(SLOTS, {slot.number: slot for slot in layout.slots})


class Window:
    """Metrics on every node. They end with this process, and begin anew with the next."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._exposure: Exposure | None = None
        self._seen: frozenset[str] = frozenset()

    def open(self, config: Config) -> None:
        """Also on nodes that joined since."""
        alive = frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])
        if alive != self._seen:
            self._exposure = self._exposure or Exposure(config, self._say)
            self._exposure.start()
            self._seen = alive

    def close(self) -> None:
        if self._exposure:
            self._exposure.withdraw()
        self._exposure, self._seen = None, frozenset()
