"""The nodes of the Ray cluster that this process is connected to, and the GPUs that each of them has."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from gammaray.actors.labels import ISLAND, NODE, POOL
from gammaray.actors.place import NODE_ID
from gammaray.actors.probe import ask
from gammaray.cluster.topology import Topology
from gammaray.cluster.visible import visible
from gammaray.errors import ConfigError

logger = logging.getLogger(__name__)

PROBE_S = 60.0  # the driver may take seconds to wake its GPUs
LOOPBACK = "127.0.0.1"
Probe = Callable[[], Topology]


@dataclass(frozen=True, slots=True)
class Node:
    """`labels` select it. Those that an operator gave survive a restart of the node, Ray's id does not."""

    id: str
    name: str
    labels: Mapping[str, str]
    gpus: int  # that Ray counts


def nodes(pools: Collection[str] = ()) -> list[Node]:
    """Every node that can hold a replica, ordered by name; of these pools alone, if there are any."""
    able = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    alive = [node for node in able if not pools or node["Labels"].get(POOL) in pools]
    often = Counter(map(_name, alive))
    found = [_node(node, unique=often[_name(node)] == 1) for node in alive]
    return sorted(found, key=lambda node: node.name)


def missing(pools: Mapping[str, int]) -> dict[str, int]:
    """How many more nodes each pool must have; pools that are complete are left out."""
    there = Counter(node["Labels"].get(POOL) for node in ray.nodes() if node["Alive"])
    return {pool: count - there[pool] for pool, count in pools.items() if there[pool] < count}


def on_this_machine() -> bool:
    """Whether every node is reached over loopback, so that nothing needs to listen elsewhere."""
    return all(node["NodeManagerAddress"] == LOOPBACK for node in ray.nodes() if node["Alive"])


def _node(node: Mapping[str, Any], unique: bool) -> Node:
    name = _name(node) if unique else f"{_name(node)}-{node['NodeID'][:8]}"
    given = {key: value for key, value in node["Labels"].items() if key in (NODE, ISLAND)}
    labels = given if NODE in given and unique else {NODE_ID: node["NodeID"]}
    return Node(node["NodeID"], name, labels, int(node["Resources"].get("GPU", 0)))


def _name(node: Mapping[str, Any]) -> str:
    """A raylet that has only one NVLink island of a machine is a node of its own."""
    labels = node["Labels"]
    parts = [labels.get(NODE, node["NodeManagerHostname"]), labels.get(ISLAND)]
    return "/".join(filter(None, parts))


def topologies(
    probe: Probe, among: Sequence[Node], timeout_s: float = PROBE_S
) -> list[tuple[Node, Topology]]:
    """What `probe` sees on each node, named like the node and without the GPUs that its raylet does not have.

    A node that does not answer is left out, with a warning. Raises ConfigError where a probe does.
    """
    answers = ask(probe, [node.id for node in among], timeout_s)
    found = []
    for node in among:
        answer = answers[node.id]
        if isinstance(answer, ConfigError):
            raise ConfigError(f"node {node.name}: {answer.message}")
        if isinstance(answer, Exception):
            logger.warning("node %s is left out: the probe of its GPUs failed: %s", node.name, answer)
            continue
        topology = visible(answer.found, answer.environ)
        found.append((node, replace(topology, node=node.name)))
    return found
