"""Which GPU holds what: a pure function from topologies and demand to a plan whose lines carry reasons.

The rules are told in docs/placement.md; `sites.py` has them in order of preference, `search.py` tries them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gammaray.cluster import cpus, misfits
from gammaray.cluster.devices import Hardware, hardware
from gammaray.cluster.plans import (
    Demand,
    DraftDemand,
    Mode,
    Placed,
    Plan,
    Role,
    TargetDemand,
    Unplaced,
)
from gammaray.cluster.reasons import GROWS, Reasons, inside
from gammaray.cluster.search import best
from gammaray.cluster.shares import fractions
from gammaray.cluster.sites import Sites, drafts_near
from gammaray.cluster.state import Draft, Spot, State
from gammaray.cluster.topology import Topology, count

LEAST_STEPS = 500  # of the search, for a better answer than the first; of 5 ms in a cluster of 500 GPUs
WORK = 50_000  # steps x GPUs: the fewer these are, the less a step takes

__all__ = ["Demand", "DraftDemand", "Mode", "Placed", "Plan", "Role", "TargetDemand", "Unplaced", "plan"]


def plan(topologies: Sequence[Topology], demand: Demand) -> Plan:
    """The best placement; the same for any order of `topologies`. Raises ConfigError for a name used twice.

    Replicas come first, then drafts. Nodes without GPUs are used only when no node has any.
    """
    hw = hardware(topologies, demand.min_nvlink_version)
    if not hw.devices:
        return cpus.plan(topologies, demand)
    sites = Sites(hw, demand)
    steps = max(LEAST_STEPS, WORK // len(hw.devices))
    state = _with_copies(sites, best(sites.items, sites.start(), sites.options, steps))
    state = _with_spares(sites, state)
    reasons = Reasons(hw, demand, state)
    notes = (*demand.notes, *_notes(reasons))
    return Plan(tuple(_placed(reasons)), tuple(_unplaced(reasons)), notes)


def _with_copies(sites: Sites, state: State) -> State:
    """Replicas beyond a pool that no worker reaches get a copy in their process, if it fits."""
    served = _served(sites.hw, sites.demand, state)
    for pool in sites.demand.drafts:
        alone = pool.light or pool.wish == "split"
        for replica in range(pool.workers, 0 if alone else len(state.sites)):
            if (pool, replica) not in served:
                state = sites.copy(Draft(replica, pool, replica), state) or state
    return state


def _with_spares(sites: Sites, state: State) -> State:
    """Room for the workers with which pools may grow, where there is some when everything else is placed."""
    apart = {draft.demand for draft, spot in state.spots if spot.via != "same-process"}
    for pool in (pool for pool in sites.demand.drafts if pool in apart):
        for worker in pool.further:
            draft = Draft(worker % len(state.sites), pool, worker)
            state = sites.further(draft, state) or state
    return state


def _served(hw: Hardware, demand: Demand, state: State) -> set[tuple[DraftDemand, int]]:
    """Pools, and replicas beyond them that ask a worker of another replica."""
    found = set()
    workers = {(draft.demand, draft.worker): spot for draft, spot in state.spots}
    for pool in demand.drafts:
        for replica in range(pool.workers, len(state.sites)):
            spot = workers.get((pool, replica % pool.workers))
            near = hw.near[state.sites[replica][0]]
            if spot and spot.via != "same-process" and (pool.wish == "split" or near >> spot.device & 1):
                found.add((pool, replica))
    return found


def _placed(reasons: Reasons) -> Iterator[Placed]:
    """Each replica, then the drafts near it."""
    hw, demand, state = reasons.hw, reasons.demand, reasons.state
    shares, draft_shares = fractions(hw, demand, state)
    served = {replica for _, replica in _served(hw, demand, state)}
    for replica, site in enumerate(state.sites):
        drafts = [
            _draft(reasons, draft, spot, share)
            for (draft, spot), share in zip(state.spots, draft_shares, strict=True)
            if draft.replica == replica
        ]
        node = hw.devices[site[0]].node
        yield Placed(
            role="target",
            node=node,
            gpus=tuple(hw.devices[i].index for i in site),
            mode="split" if replica in served else _mode(drafts),
            reason=reasons.target(replica),
            replica=replica,
            uuids=tuple(hw.devices[i].uuid for i in site),
            memory_fraction=shares[replica],
        )
        yield from drafts
        for pool in demand.drafts:
            for worker in cpus.near(pool, replica, len(state.sites)) if pool.light else ():
                yield Placed(
                    "draft", node, (), "in-process", inside(pool), replica, pool.tenant, pool.drafter, worker
                )


def _mode(drafts: Sequence[Placed]) -> Mode:
    """Of a target: how the drafters near it are attached, without those that may come."""
    modes = {draft.mode for draft in drafts if not draft.spare}
    return "split" if "split" in modes else "same-gpu" if modes else "in-process"


def _draft(reasons: Reasons, draft: Draft, spot: Spot, share: float) -> Placed:
    device = reasons.hw.devices[spot.device]
    spare = draft.worker in draft.demand.further and spot.via != "same-process"
    reason = reasons.draft(draft, spot)
    return Placed(
        role="draft",
        node=device.node,
        gpus=(device.index,),
        mode="same-gpu" if spot.via == "same-process" else "split",
        reason=f"{GROWS} {reason}" if spare else reason,
        replica=draft.replica,
        tenant=draft.demand.tenant,
        drafter=draft.demand.drafter,
        worker=draft.worker,
        spare=spare,
        uuids=(device.uuid,),
        memory_fraction=share,
    )


def _unplaced(reasons: Reasons) -> Iterator[Unplaced]:
    """Missing replicas, then missing workers."""
    demand, state = reasons.demand, reasons.state
    replicas = len(state.sites)
    for number in range(replicas, demand.target.replicas):
        yield misfits.replica(reasons.hw, demand, number, replicas)
    if not replicas:
        for pool in (pool for pool in demand.drafts if not pool.light):  # those need no place of their own
            yield from (misfits.orphan(pool, worker) for worker in range(pool.workers))
    there = {draft for draft, _ in state.spots}
    for replica in range(replicas):
        for draft in drafts_near(demand, replica, replicas):
            if draft not in there:
                yield misfits.draft(reasons, draft)


def _notes(reasons: Reasons) -> Iterator[str]:
    hw, state = reasons.hw, reasons.state
    yield from (f"{topology.node}: {note}" for topology in hw.topologies for note in topology.notes)
    unknown = sorted({device.node for device in hw.devices if device.memory is None})
    if unknown:
        yield f"the GPU memory of {', '.join(unknown)} is unknown: everything is assumed to fit"
    for pool in reasons.demand.drafts:
        there = sum(draft.demand == pool for draft, spot in state.spots if spot.via != "same-process")
        if pool.workers <= there < pool.max_workers:
            who = f"pool of {pool.tenant} for {pool.drafter}"
            yield f"{who}: room for {count(there, 'worker')}, of at most {pool.max_workers}"
    if any(spot.via != "same-process" for _, spot in state.spots):
        yield reasons.traffic()
