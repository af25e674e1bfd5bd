"""Where a replica or a draft worker may go, the preferred place first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain

from gammaray.cluster.devices import Hardware, bits, cliques, counter, mask
from gammaray.cluster.plans import Demand
from gammaray.cluster.state import Draft, Item, Spot, State, Via

DISTANCE = {"PIX": 0, "PXB": 1, "PHB": 2, "NODE": 3, "SYS": 4, None: 5}


@dataclass(frozen=True, slots=True)
class Want:
    """How many GPUs the drafts near a replica could use."""

    gpus: int
    forced: int  # of these, how many need no link
    need: int  # bytes that one must have


class Sites:
    """The options of one demand on given hardware."""

    def __init__(self, hw: Hardware, demand: Demand) -> None:
        self.hw, self.demand = hw, demand
        self._size = demand.target.tensor_parallel
        self._most = counter(hw, self._size)
        self._capable = self._holding(demand.target.need)
        self._small = cache(self._holding)
        self.replicas = min(demand.target.replicas, self._groups_left(self._capable))
        self.items = self._items()
        self._wants = [self._want(replica) for replica in range(self.replicas)]
        wanted = accumulate(want.gpus for want in reversed(self._wants))
        self._wanted = list(wanted)[::-1]  # by a replica and those after it

    def start(self) -> State:
        return State(tuple(device.room for device in self.hw.devices), (0,) * len(self.hw.devices))

    def options(self, item: Item, state: State) -> Iterator[State]:
        """What may follow; last comes leaving a draft out. A replica is never left out."""
        return self._replica(state) if isinstance(item, int) else self._draft(item, state)

    def copy(self, draft: Draft, state: State) -> State | None:
        """The draft in the target's process on its lead GPU; None when there is no room."""
        lead, drafter = state.sites[draft.replica][0], (draft.replica, draft.demand.drafter)
        if drafter in state.copies:
            return state.put(draft, Spot(lead, "same-process", shared=True), 0)
        if state.room[lead] < draft.demand.need:
            return None
        after = state.put(draft, Spot(lead, "same-process"), draft.demand.need)
        return replace(after, copies=state.copies | {drafter})

    def further(self, draft: Draft, state: State) -> State | None:
        """A worker that comes when its pool grows, on a GPU of its own; None when there is none."""
        for after in self._draft(draft, state):
            if after is state or (spot := after.spots[-1][1]).via == "same-process":
                continue
            if after.loads[spot.device] == 1 and not state.taken >> spot.device & 1:
                return after
        return None

    def _items(self) -> list[Item]:
        """Each replica, then the drafts near it: worker i of a pool is near replica i mod R.

        A draft that no GPU could hold is left out: searching would not help it.
        """
        items: list[Item] = []
        for replica in range(self.replicas):
            items.append(replica)
            items += [
                draft for draft in drafts_near(self.demand, replica, self.replicas) if self._fits(draft)
            ]
        return items

    def _fits(self, draft: Draft) -> bool:
        need = draft.demand.need
        if draft.demand.wish == "same-gpu":
            need += self.demand.target.need
        return self._holding(need) != 0

    def _want(self, replica: int) -> Want:
        near = (item for item in self.items if isinstance(item, Draft) and item.replica == replica)
        apart = [draft.demand for draft in near if draft.demand.wish != "same-gpu"]
        forced = sum(demand.wish == "split" for demand in apart)
        return Want(len(apart), forced, min((demand.need for demand in apart), default=0))

    def _holding(self, need: int) -> int:
        return mask(i for i, device in enumerate(self.hw.devices) if device.room >= need)

    def _groups_left(self, free: int) -> int:
        return sum(self._most(free & island) for island in self.hw.islands)

    def _leaves_enough(self, state: State, used: int, missing: int) -> bool:
        """Whether `missing` replicas still find a group when `used` are gone."""
        return missing <= 0 or self._groups_left(state.free(self._capable) & ~used) >= missing

    def _replica(self, state: State) -> Iterator[State]:
        """Best fit: as many free GPUs linked to the lead as drafts want, else one with room beside other
        drafts; in the smallest island and node.
        """
        sites = sorted(self._groups(state), key=lambda site: self._rank(state, site))
        missing = self.replicas - len(state.sites) - 1
        for site in sites:
            group = mask(iter(site))
            if self._leaves_enough(state, group, missing):
                need = self.demand.target.need
                room = tuple(left - need * (group >> i & 1) for i, left in enumerate(state.room))
                yield replace(
                    state,
                    room=room,
                    taken=state.taken | group,
                    sites=(*state.sites, site),
                    placed=state.placed + 1,
                )

    def _groups(self, state: State) -> Iterator[tuple[int, ...]]:
        """Every free group with every lead; of places that are alike, one."""
        untouched = set[int]()
        for topology in self.hw.topologies:
            here = self.hw.nodes[topology.node]
            free, shape = state.free(here), self.hw.shapes[topology.node]
            if free == here and shape in untouched:
                continue
            untouched |= {shape} if free == here else set()
            for group in cliques(self.hw, free & self._capable, self._size):
                for lead in bits(group):
                    if not self.hw.twins[lead] & group:
                        yield (lead, *bits(group & ~(1 << lead)))

    def _rank(self, state: State, site: tuple[int, ...]) -> tuple[float, ...]:
        lead, want = site[0], self._wants[len(state.sites)]
        fair = self._fair(len(state.sites), state.free(self._all).bit_count() - self._size)
        free = state.free(self._all) & ~mask(iter(site))
        partners = (free & self.hw.near[lead] & self._small(want.need)).bit_count()
        island = next(island for island in self.hw.islands if island >> lead & 1)
        node = self.hw.nodes[self.hw.devices[lead].node]
        room = sum(state.room[i] for i in site)
        sizes = ((free & island).bit_count(), island.bit_count(), (free & node).bit_count())
        others = (free & node & self._small(want.need)).bit_count()
        alone, forced = min(partners, want.gpus, fair), min(others, want.forced, fair)
        held = self.hw.near[lead] & state.drafting & ~state.taken
        shared = not alone and any(state.room[i] >= want.need for i in bits(held))
        return (-alone, -shared, -forced, *sizes, room, *site)

    @property
    def _all(self) -> int:
        return (1 << len(self.hw.devices)) - 1

    def _draft(self, draft: Draft, state: State) -> Iterator[State]:
        lead, wish = state.sites[draft.replica][0], draft.demand.wish
        if wish != "same-gpu":
            yield from self._split(draft, state, self.hw.near[lead], "nvlink")
        if wish == "split":
            here = self.hw.nodes[self.hw.devices[lead].node] & ~(1 << lead)
            yield from self._split(draft, state, here & ~self.hw.near[lead], "pcie")
            yield from self._split(draft, state, 1 << lead, "same-gpu")
            yield from self._split(draft, state, self._all & ~here & ~(1 << lead), "network")
        elif after := self.copy(draft, state):
            yield after
        yield state

    def _fair(self, replica: int, free: int) -> int:
        """How many of `free` GPUs a replica's drafts may have: those after it, and theirs, need some too."""
        spare = free - self._size * (self.replicas - replica - 1)
        own, from_here = self._wants[replica].gpus, self._wanted[replica]
        return math.ceil(spare * own / from_here) if from_here else 0

    def _split(self, draft: Draft, state: State, candidates: int, via: Via) -> Iterator[State]:
        """A free device first, unless the replica's drafts have their part of those; else one with drafts."""
        own = {spot.device for other, spot in state.spots if other.replica == draft.replica}
        free = state.free(self._all).bit_count() + len(own)
        ways = [self._alone(draft, state, candidates, via), self._shared(draft, state, candidates, via)]
        enough = len(own) >= self._fair(draft.replica, free)
        return chain(*(reversed(ways) if enough else ways))

    def _alone(self, draft: Draft, state: State, candidates: int, via: Via) -> Iterator[State]:
        """The nearest free device, of those the smallest that does."""
        lead, need = state.sites[draft.replica][0], draft.demand.need
        free = state.free(candidates) & self._small(need)
        missing = self.replicas - len(state.sites)
        for i in sorted(bits(free), key=lambda i: self._nearness(lead, i, state)):
            alike = via == "nvlink" and self.hw.twins[i] & free
            if not alike and self._leaves_enough(state, 1 << i, missing):
                yield state.put(draft, Spot(i, via), need)

    def _shared(self, draft: Draft, state: State, candidates: int, via: Via) -> Iterator[State]:
        """The nearest device that holds drafts, of those the one with the fewest."""
        lead, need = state.sites[draft.replica][0], draft.demand.need
        shared = candidates if via == "same-gpu" else candidates & state.drafting & ~state.taken
        for i in sorted(bits(shared), key=lambda i: self._nearness(lead, i, state)):
            if state.room[i] >= need:
                yield state.put(draft, Spot(i, via), need)

    def _nearness(self, lead: int, i: int, state: State) -> tuple[float, ...]:
        a, b = self.hw.devices[lead], self.hw.devices[i]
        other = a.node != b.node
        join = None if other else self.hw.topology(a.node).join(a.index, b.index)
        pcie = DISTANCE[join.pcie] if join and not self.hw.near[lead] >> i & 1 else 0
        return (other, pcie, state.loads[i], state.room[i] * (-1 if state.loads[i] else 1), i)


def drafts_near(demand: Demand, replica: int, replicas: int) -> list[Draft]:
    """Workers of all pools whose drafter computes a model; first workers first."""
    pools = [draft for draft in demand.drafts if not draft.light]
    found = [Draft(replica, pool, i) for pool in pools for i in range(replica, pool.workers, replicas)]
    return sorted(found, key=lambda draft: draft.worker)
