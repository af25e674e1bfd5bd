"""A plan as operators see it: GPU islands, and who sits where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gammaray.cluster.plans import Placed, Plan
from gammaray.cluster.topology import Topology, islands

Json = dict[str, Any]
NOWHERE: Json = {"islands": [], "seats": []}


def outline(plan: Plan, topologies: Sequence[Topology], min_nvlink_version: float) -> Json:
    """A member of an island is [node, GPU]; the seat of a process on a CPU has no GPU."""
    found = [
        [[topology.node, gpu] for gpu in island]
        for topology in topologies
        for island in islands(topology, min_nvlink_version)
    ]
    return {"islands": found, "seats": [seat for placed in plan.placements for seat in _seats(placed)]}


def _seats(placed: Placed) -> list[Json]:
    what = f"target {placed.replica or 0}" if placed.role == "target" else f"{placed.drafter}"
    common = {"node": placed.node, "what": what, "tenant": placed.tenant}
    return [common | {"gpu": gpu} for gpu in placed.gpus or (None,)]
