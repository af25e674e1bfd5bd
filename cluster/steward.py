"""The steward of a declared application: an actor that holds what `gammaray serve` holds with its process.

It takes a configuration from the task in which Serve builds the application: it waits for nodes, plans,
reserves GPUs, has draft workers and a controller start. Then it watches: when a node of the layout is lost
and its pool is complete again, it plans anew and has Serve move the replicas that must; when the application
is gone from Serve it leaves all. What it knows is in Ray's KV, so it may be lost itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from gammaray.actors.crew import NAMESPACE, get, put
from gammaray.actors.draft import LinkFactory
from gammaray.actors.place import housed
from gammaray.cluster import deployments, holdings
from gammaray.cluster.declaration import declaration
from gammaray.cluster.holdings import KEPT, Kept, Window
from gammaray.cluster.layout import Layout
from gammaray.cluster.moves import homes, overrides, renumbered
from gammaray.cluster.nodes import Node, Probe, missing, nodes
from gammaray.cluster.prepare import prepare
from gammaray.cluster.run import APP
from gammaray.config import Config
from gammaray.errors import ConfigError, GammarayError

logger = logging.getLogger(__name__)

NAME = "steward"
POLL_S = 1.0
SAY_S = 60.0  # between two lines about nodes that are waited for
GONE_S = 10.0  # without the application, before all is left
LOST_S = 10.0  # without a node, before its replicas get another one
AGAIN_S = 10.0  # after a start that failed: Ray has Serve's task try four times, each a stop of what runs
CALLS = 8  # at once: a new declaration must be heard while an old one waits


@dataclass(frozen=True, slots=True)
class Taken:
    """How Serve is to build what was declared."""

    config: Config
    layout: Layout


class Lasting:
    """Whether something has been so for long enough."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._since: float | None = None

    def __call__(self, so: bool) -> bool:
        if not so:
            self._since = None
            return False
        now = self._clock()
        self._since = now if self._since is None else self._since
        return now - self._since >= self._seconds


class Steward:
    """Of one declaration at a time; a newer one ends the waiting of an older one."""

    def __init__(self) -> None:
        self._kept: Kept | None = get(KEPT)
        self._lock, self._turn, self._counting = threading.Lock(), 0, threading.Lock()
        self._gone, self._lost = Lasting(GONE_S), Lasting(LOST_S)
        self._failed: tuple[object, float, ConfigError] | None = None  # what did not start, and when
        self._metrics = Window(self._say)
        self._said = ""
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def take(self, args: Mapping[str, Any], probe: Probe, link_factory: LinkFactory) -> Taken:
        """When this returns everything is held that the application needs beside Serve.

        What has no place, or does not start, leaves what was there before. Raises ConfigError, and
        GammarayError when something else was declared meanwhile.
        """
        self._gone(False)
        turn, told = self._next(), declaration(args)
        config = told.configured()
        self._wait(told.pools, turn)
        with self._lock:
            self._check(turn)
            if self._kept and (self._kept.args, self._kept.config) == (args, config):
                self._keep(replace(self._kept, built=self._kept.now))
            else:
                self._check_again(args, config)
                layout, among = prepare(config, probe, self._say, told.computing)
                kept = Kept(args, config, layout, layout, homes(layout, among), probe, link_factory)
                self._replace(self._kept, kept, among, turn)
            assert self._kept
            return Taken(config, self._kept.now)

    def _wait(self, pools: Mapping[str, int], turn: int) -> None:
        """However long it takes: a node may have to be bought, and its image fetched."""
        said = 0.0
        while more := missing(pools):
            self._check(turn)
            if time.monotonic() - said > SAY_S:
                said = time.monotonic()
                logger.warning("waiting for nodes: %s", ", ".join(f"{n} of {p}" for p, n in more.items()))
            time.sleep(POLL_S)

    def _next(self) -> int:
        with self._counting:  # calls come in threads of their own
            self._turn += 1
            return self._turn

    def _check(self, turn: int) -> None:
        if turn != self._turn:
            raise GammarayError("given up: another configuration came, or the application is gone")

    def _check_again(self, args: Mapping[str, Any], config: Config) -> None:
        if self._failed:
            what, when, error = self._failed
            if what == (args, config) and time.monotonic() - when < AGAIN_S:
                raise error

    def _replace(self, before: Kept | None, kept: Kept, among: Sequence[Node], turn: int) -> None:
        """When it fails Serve goes on with the replicas of before, which still compute on their GPUs."""
        self._leave()
        try:
            self._enter(kept, among, turn)
        except Exception as error:
            if turn == self._turn:  # else somebody else comes
                if before:
                    self._return(before, turn)
                if isinstance(error, ConfigError):
                    self._failed = (kept.args, kept.config), time.monotonic(), error
            raise

    def _return(self, before: Kept, turn: int) -> None:
        try:
            self._enter(before, nodes(declaration(before.args).computing), turn)
        except Exception as error:
            self._say(f"what was there before did not start again: {error}")

    def _enter(self, kept: Kept, among: Sequence[Node], turn: int) -> None:
        try:
            self._metrics.open(kept.config)
            holdings.acquire(kept, among, lambda: self._check(turn), self._say)
            self._keep(kept)
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        holdings.give_up()
        self._metrics.close()
        self._keep(None)

    def _keep(self, kept: Kept | None) -> None:
        put(KEPT, kept)
        self._kept = kept

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_S)
            try:
                there = deployments.applications()
                if self._gone(APP not in there):
                    self._next()  # nobody waits for nodes any more
                if self._lock.acquire(blocking=False):  # else what was seen is old before it can be used
                    try:
                        self._look(there)
                    finally:
                        self._lock.release()
                self._said = ""
            except Exception as error:  # the next look may see more
                self._say(f"{type(error).__name__}: {error}")

    def _look(self, there: Mapping[str, Any]) -> None:
        if self._kept is None:
            return
        if self._gone(APP not in there):
            self._leave()
            return
        self._metrics.open(self._kept.config)
        self._move(self._kept)
        self._tell(self._kept, there.get(APP))

    def _move(self, kept: Kept) -> None:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        lost = {name for name, node in kept.homes.items() if node not in alive}
        told = declaration(kept.args)
        if not self._lost(bool(lost)) or missing(told.pools):
            return
        self._lost(False)  # if this comes to nothing, it is tried again after as long
        layout, among = prepare(kept.config, kept.probe, self._say, told.computing)
        moved = renumbered(kept.now, layout)
        after = replace(kept, now=moved, homes=homes(moved, among))
        holdings.move(kept, after, lost, among)
        self._keep(after)
        logger.warning("planned anew without %s", ", ".join(sorted(lost)))

    def _tell(self, kept: Kept, known: Any) -> None:
        """Serve forgets where replicas moved when the same declaration comes again, so it is told again.

        Another declaration is not touched: it is being built.
        """
        wanted = overrides(kept.built, kept.now)
        if known is None or known.args != kept.args:
            return
        if deployments.overridden(known) != wanted:
            deployments.override(APP, wanted)

    def _say(self, line: str) -> None:
        """Once, however often it is so."""
        if line != self._said:
            self._said = line
            logger.warning("%s", line)


def hire() -> Any:
    """The handle of the steward, which is there from the first application to the end of the Ray cluster."""
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Steward)
    options: dict[str, Any] = {"name": NAME, "namespace": NAMESPACE, "lifetime": "detached"}
    options |= {"get_if_exists": True, "max_concurrency": CALLS, **housed(None)}
    return actor.options(**options).remote()
