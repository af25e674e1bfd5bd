"""A placement in the making."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gammaray.cluster.plans import DraftDemand

Via = Literal["nvlink", "pcie", "same-process", "same-gpu", "network"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A worker of a pool, to be placed near a replica."""

    replica: int
    demand: DraftDemand
    worker: int


Item = int | Draft  # an int is a replica


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a draft is. `via`: how the target reaches it; `same-gpu` is a process of its own there."""

    device: int
    via: Via
    shared: bool = False  # the process holds that drafter already, for another tenant or worker


@dataclass(frozen=True, slots=True)
class State:
    """What is placed so far."""

    room: tuple[float, ...]  # bytes left on each device
    loads: tuple[int, ...]  # draft processes on each device
    taken: int = 0  # mask of devices that targets hold
    drafting: int = 0  # of those that draft processes hold
    sites: tuple[tuple[int, ...], ...] = ()  # of each replica; its lead device first
    spots: tuple[tuple[Draft, Spot], ...] = ()
    copies: frozenset[tuple[int, str]] = frozenset()  # (replica, drafter) in the target's process
    placed: int = 0

    def free(self, devices: int) -> int:
        """Those of `devices` that nothing holds."""
        return devices & ~self.taken & ~self.drafting

    def put(self, draft: Draft, spot: Spot, need: int) -> State:
        """With one more draft, which takes `need` bytes."""
        i, own = spot.device, spot.via != "same-process"
        return replace(
            self,
            room=(*self.room[:i], self.room[i] - need, *self.room[i + 1 :]),
            loads=(*self.loads[:i], self.loads[i] + own, *self.loads[i + 1 :]),
            drafting=self.drafting | own << i,
            spots=(*self.spots, (draft, spot)),
            placed=self.placed + 1,
        )
