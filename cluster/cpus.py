"""The plan where no node has a GPU: everything computes on CPUs, whose memory is not counted."""

from __future__ import annotations

from collections.abc import Sequence

from gammaray.cluster.plans import Demand, DraftDemand, Mode, Placed, Plan
from gammaray.cluster.reasons import GROWS, inside
from gammaray.cluster.topology import Topology

HERE = "localhost"  # without any topology


def plan(topologies: Sequence[Topology], demand: Demand) -> Plan:
    """Replicas in turn over the nodes, drafters in the target's process unless `split` is asked for."""
    nodes = sorted(topology.node for topology in topologies) or [HERE]
    replicas = demand.target.replicas
    placed: list[Placed] = []
    for replica in range(replicas):
        node = nodes[replica % len(nodes)]
        drafts = [
            _draft(pool, i, replica, node) for pool in demand.drafts for i in near(pool, replica, replicas)
        ]
        placed += [_target(demand, replica, node), *drafts]
    notes = (f"{topology.node}: {note}" for topology in topologies for note in topology.notes)
    return Plan(tuple(placed), notes=(*demand.notes, *sorted(notes)))


def near(pool: DraftDemand, replica: int, replicas: int) -> range:
    """Numbers of the workers near a replica. In its process each replica has a drafter of its own."""
    workers = max(pool.workers, pool.max_workers if _split(pool) else replicas)
    return range(replica, workers, replicas)


def _split(pool: DraftDemand) -> bool:
    return pool.wish == "split" and not pool.light


def _target(demand: Demand, replica: int, node: str) -> Placed:
    """Workers of a pool serve all replicas."""
    split = any(_split(pool) for pool in demand.drafts)
    parallel = demand.target.tensor_parallel
    where = f"in {parallel} processes on the CPU" if parallel > 1 else "on the CPU"
    mode: Mode = "split" if split else "in-process"
    return Placed("target", node, (), mode, f"no node has a GPU: computes {where}", replica)


def _draft(pool: DraftDemand, worker: int, replica: int, node: str) -> Placed:
    if _split(pool):
        reason = "as `placement: split` asks: a process of its own beside the target, on the CPU"
        spare = worker in pool.further
        reason = f"{GROWS} {reason}" if spare else reason
        return Placed("draft", node, (), "split", reason, replica, pool.tenant, pool.drafter, worker, spare)
    computes = "no node has a GPU: computes in the target's process"
    reason = computes if pool.method == "model" else inside(pool)
    return Placed("draft", node, (), "in-process", reason, replica, pool.tenant, pool.drafter, worker)
