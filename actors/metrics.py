"""One process a machine that listens for Prometheus, and where the processes of a machine meet."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gammaray.config import Config
from gammaray.errors import ConfigError
from gammaray.telemetry.endpoint import Endpoint, listening_host
from gammaray.telemetry.sockets import folder, gather

START_S = 30.0


def session_folder() -> Path:
    """Of this process's Ray session; the same in all of its processes of a machine."""
    return folder(ray.get_runtime_context().get_session_name())


class MetricsActor:
    """Gathers from the processes of its machine whenever it is asked, and keeps nothing."""

    def __init__(self, host: str, port: int, keys: Sequence[str]) -> None:
        """See Endpoint; when it cannot listen `address` says why."""
        directory, self._fault = session_folder(), ""
        try:
            self._endpoint = Endpoint(host, port, lambda: gather(directory), keys)
        except ConfigError as error:
            self._fault = error.message

    def address(self) -> str:
        """Raises ConfigError."""
        if self._fault:
            raise ConfigError(self._fault)
        return f"http://{self._endpoint.host}:{self._endpoint.port}/metrics"


class Exposure:
    """An actor on each machine, for as long as somebody keeps this."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        """`say` is told of machines whose metrics cannot be read: that is no reason not to serve."""
        self._config, self._say = config, say
        self._actors: dict[str, tuple[str, Any]] = {}  # by machine: Ray's node, and the actor there

    def start(self) -> list[str]:
        """On machines that have none; returns the addresses of all. To be called again when some joined."""
        if not self._config.telemetry.prometheus_port:
            return []
        alive = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
        self._actors = {machine: one for machine, one in self._actors.items() if one[0] in alive}
        for node, machine in alive.items():
            if machine not in self._actors:  # it may have several raylets
                self._actors[machine] = node, _actor(self._config, node)
        return [address for machine in self._actors if (address := self._address(machine))]

    def withdraw(self) -> None:
        """No machine listens any more; `start` would begin anew."""
        for _, actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}

    def stop(self) -> None:
        """At the very end: what the processes of this machine left goes too."""
        self._actors = {}
        shutil.rmtree(session_folder(), ignore_errors=True)

    def _address(self, machine: str) -> str | None:
        _, actor = self._actors[machine]
        try:
            address: str = ray.get(actor.address.remote(), timeout=START_S)
        except Exception as error:  # Ray's own too: the machine may be on its way out
            self._say(f"warning: no metrics of {machine}: {getattr(error, 'message', error)}")
            return None
        return address


def _actor(config: Config, node: str) -> Any:
    server, told = config.server, config.telemetry
    keys = [key.sha256 for key in server.operator_keys] if server.protect_metrics else []
    actor = ray.remote(num_cpus=0, max_restarts=-1)(MetricsActor)
    there = actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
    return there.remote(listening_host(server.host), told.prometheus_port, keys)
