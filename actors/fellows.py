"""The other ranks of a target whose weights several processes share: actors that end with rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from gammaray.actors.place import NODE_ID, Place, cap_memory, check_place, whereabouts
from gammaray.config import Config
from gammaray.engine.threads import compute_with
from gammaray.errors import EngineFailure

if TYPE_CHECKING:
    from gammaray.engine.ranks import Meeting


class Fellow:
    """One rank but the first. A plain class, made an actor below."""

    def follow(self, config: Config, rank: int, meeting: Meeting, place: Place, threads: int | None) -> None:
        """Its whole life. Raises ReplicaLost when another rank is gone."""
        compute_with(place.threads(threads))
        check_place(place)
        cap_memory(place)
        from gammaray.engine.build import follow

        follow(config, rank, meeting)


class Fellows:
    """Started by rank 0, on its node. Ray ends them when the process of rank 0 ends."""

    def __init__(self, config: Config, places: Sequence[Place], threads: int | None) -> None:
        """`places`: of ranks 1, 2, ..."""
        from gammaray.engine.ranks import host

        self.seat = host(1 + len(places))
        here = {NODE_ID: whereabouts().node}  # where the meeting is, over loopback
        self._actors, self._lives = [], []
        for rank, place in enumerate(places, 1):
            own = replace(place, labels=here)
            actor: Any = ray.remote(num_cpus=0)(Fellow).options(**own.options(strict=True)).remote()
            self._actors.append(actor)
            self._lives.append(actor.follow.remote(config, rank, self.seat.meeting, own, threads))

    def check(self) -> None:
        """Raises EngineFailure when one of them has ended."""
        ended, _ = ray.wait(self._lives, num_returns=len(self._lives), timeout=0)
        if ended:
            raise EngineFailure("a rank of the target has ended; its replica will be replaced")
