"""A plan as Ray carries it out: replicas of the target, and posts of draft workers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gammaray.actors.draft import Post
from gammaray.actors.place import Place
from gammaray.actors.pool import Pool
from gammaray.actors.target import Slot
from gammaray.cluster.nodes import Node
from gammaray.cluster.outline import NOWHERE, outline
from gammaray.cluster.plans import Placed, Plan
from gammaray.cluster.topology import Topology
from gammaray.config import Config
from gammaray.errors import ConfigError

Gpu = frozenset[str]  # every name that Ray may have for it


@dataclass(frozen=True, slots=True)
class Layout:
    """What is started. The default: one replica, wherever Ray likes."""

    slots: tuple[Slot, ...] = (Slot(),)
    posts: tuple[Post, ...] = ()
    gpus: Mapping[str, tuple[Gpu, ...]] = field(default_factory=dict)  # to be leased, by their node's name
    outline: Mapping[str, Any] = field(default_factory=lambda: NOWHERE)  # see outline.py


DEFAULT = Layout()


def layout(plan: Plan, config: Config, found: Sequence[tuple[Node, Topology]]) -> Layout:
    """Raises ConfigError when the plan leaves something out."""
    if plan.unplaced:
        lines = (f"{left.what}: {left.reason}; {left.needs}" for left in plan.unplaced)
        raise ConfigError("there is no place for " + "\nand none for ".join(lines))
    nodes = {node.name: node for node, _ in found}
    targets = sorted((p for p in plan.placements if p.role == "target"), key=lambda p: p.replica or 0)
    drafts = [p for p in plan.placements if p.role == "draft" and p.mode == "split"]
    places = _Places(plan, config, nodes)
    posts = tuple(_post(placed, config, places) for placed in drafts)
    slots = tuple(_slot(placed, places, _pools(plan, placed.replica)) for placed in targets)
    topologies = [topology for _, topology in found]
    gpus = _gpus([*targets, *drafts], {topology.node: topology for topology in topologies})
    return Layout(slots, posts, gpus, outline(plan, topologies, config.placement.min_nvlink_version))


def _pools(plan: Plan, replica: int | None) -> frozenset[Pool]:
    """Tenant and drafter of those that draft for a replica from outside its process."""
    drafts = [p for p in plan.placements if p.tenant is not None and p.drafter is not None]
    outside = {(p.tenant or "", p.drafter or "") for p in drafts if p.mode == "split"}
    inside = {(p.tenant, p.drafter) for p in drafts if p.mode != "split" and p.replica == replica}
    return frozenset(outside - inside)


class _Places:
    """Where the processes of a plan go, and what they share there."""

    def __init__(self, plan: Plan, config: Config, nodes: Mapping[str, Node]) -> None:
        self._nodes, self._ranks = nodes, config.target.tensor_parallel
        self._processes = Counter(
            placed.node
            for placed in plan.placements
            for _ in range(self._ranks if placed.role == "target" else 1)
            if placed.role == "target" or (placed.mode == "split" and not placed.spare)
        )
        self._guests = [p for p in plan.placements if p.mode == "same-gpu" and p.role == "draft"]

    def of_target(self, placed: Placed) -> tuple[Place, ...]:
        """Of each rank. The first also holds the drafters that live in its process."""
        own = placed.memory_fraction
        guests = sum(p.memory_fraction or 0.0 for p in self._guests if p.replica == placed.replica)
        shares = [own if own is None else own + guests, *[own] * (self._ranks - 1)]
        devices = [placed.uuids[rank : rank + 1] for rank in range(self._ranks)]
        return tuple(self._place(placed.node, *pair) for pair in zip(devices, shares, strict=True))

    def of_draft(self, placed: Placed) -> Place:
        return self._place(placed.node, placed.uuids, placed.memory_fraction)

    def _place(self, node: str, devices: tuple[str, ...], share: float | None) -> Place:
        return Place(self._nodes[node].labels, devices, share, max(1, self._processes[node]))


def _slot(placed: Placed, places: _Places, pools: frozenset[Pool]) -> Slot:
    first, *others = places.of_target(placed)
    return Slot(placed.replica or 0, first, tuple(others), pools)


def _post(placed: Placed, config: Config, places: _Places) -> Post:
    if placed.tenant is None or placed.drafter is None:
        raise ValueError("a draft worker belongs to a tenant and a drafter")
    version = version_of(config, placed.drafter)
    where = places.of_draft(placed)
    return Post(placed.tenant, placed.drafter, version, placed.worker, where, placed.replica)


def version_of(config: Config, drafter: str) -> str:
    """The configured one, and a mark that changes with anything else that is configured of the drafter."""
    settings = config.drafters[drafter]
    mark = hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:6]
    return f"{settings.version}-{mark}"


def _gpus(placed: Sequence[Placed], known: Mapping[str, Topology]) -> dict[str, tuple[Gpu, ...]]:
    """Each once, also when it is shared. A MIG part is held by its GPU."""
    found: dict[str, tuple[Gpu, ...]] = {}
    for node in sorted({p.node for p in placed if p.gpus}):
        used = {index for p in placed if p.node == node for index in p.gpus}
        found[node] = tuple(
            frozenset({str(gpu.index), gpu.uuid}) for gpu in known[node].gpus if gpu.index in used
        )
    return found
