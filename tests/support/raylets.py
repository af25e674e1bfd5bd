"""Several raylets on this machine, with GPUs that exist in Ray's books alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import combinations
from typing import Any

import psutil

from gammaray.cluster.topology import Gpu, Join, Topology

GPUS = 8  # of a machine
LINK = Join(nvlinks=18, pcie="NODE")
SYSTEM = {
    "prestart_worker_first_driver": False,  # a process for each core of each node, which takes seconds here
    # A raylet that is gone is noticed within two seconds:
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


class Raylets:
    """Nodes by name; the head is called `head`."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(shutdown_at_exit=True)
        self._nodes: dict[str, Any] = {}
        self.add("head", include_dashboard=False, _system_config=SYSTEM)
        self.address: str = self._cluster.address

    def add(
        self,
        name: str,
        gpus: int = GPUS,
        island: str | None = None,
        visible: str | None = None,
        pool: str | None = None,
        **options: Any,
    ) -> None:
        """A machine, or one NVLink island of it, whose GPUs are `visible` to its raylet."""
        labels = {"gammaray/node": name, **({"gammaray/island": island} if island else {})}
        labels |= {"gammaray/pool": pool} if pool else {}
        environment = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
        self._nodes[f"{name}/{island}" if island else name] = self._cluster.add_node(
            num_cpus=1, num_gpus=gpus, labels=labels, env_vars=environment, **options
        )

    def kill(self, name: str) -> None:
        """As if its power failed: the raylet and all of its workers at once."""
        node = self._nodes.pop(name)
        raylets = [psutil.Process(info.process.pid) for info in node.all_processes["raylet"]]
        for process in [p for raylet in raylets for p in (raylet, *raylet.children(recursive=True))]:
            process.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


def machine(islands: tuple[range, ...] = (range(GPUS),)) -> Topology:
    """GPUs of 80 GiB; those of one island are all linked with each other."""
    gpus = tuple(
        Gpu(i, f"GPU-{i}", "NVIDIA H100 80GB HBM3", 80 * 2**30, nvlink_version=4.0) for i in range(GPUS)
    )
    linked = {pair for island in islands for pair in combinations(island, 2)}
    joins = {pair: LINK if pair in linked else Join(pcie="SYS") for pair in combinations(range(GPUS), 2)}
    return Topology("", gpus, joins)


def probe_by_label(machines: Mapping[str, Topology]) -> Topology:
    """To be run on a node: what its driver would say."""
    import ray

    return machines[ray.get_runtime_context().get_node_labels()["gammaray/node"]]  # type: ignore[index]


def narrowed(whole: Topology, node: str, gpus: range) -> Topology:
    """What a raylet has that sees only those."""
    joins = {pair: join for pair, join in whole.joins.items() if {*pair} <= {*gpus}}
    return Topology(node, tuple(whole.gpus[i] for i in gpus), joins)


def processes(*kinds: str) -> list[psutil.Process]:
    """Ray's workers of those kinds that descend from this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            found += [process] if process.name().startswith(kinds) else []
    return found


def worker(pid: int) -> psutil.Process:
    """One of Ray's, which must be a descendant of this process."""
    process = psutil.Process(pid)
    assert os.getpid() in {parent.pid for parent in process.parents()}
    return process
