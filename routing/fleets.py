"""How each tenant's draft workers are, from what the replicas tell of their connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gammaray.routing.book import Fleet
from gammaray.routing.window import Window
from gammaray.types import DraftLinks

SILENT_TICKS = 6  # then a replica is gone, and what it told holds no more
EXCUSED_S = 15.0  # after an incident, a request that lost its worker is no fallback


@dataclass(frozen=True, slots=True)
class Pooled:
    """`workers`: connections, of all replicas. `incidents`: workers lost since the last tick."""

    workers: int
    incidents: int


@dataclass(slots=True)
class _View:
    """One replica's. `counted`: losses up to the last tick, `fresh`: those new at it."""

    workers: int
    losses: int
    counted: int
    fresh: int = 0
    silent: int = 0


class Fleets:
    """`fold` every window, `close` every tick."""

    def __init__(self) -> None:
        self._views: dict[Fleet, dict[str, _View]] = {}
        self._troubled: dict[Fleet, float] = {}  # when last

    def fold(self, window: Window) -> None:
        for link in window.links:
            self._see(window, link)

    def _see(self, window: Window, link: DraftLinks) -> None:
        """What a replica lost before we heard of it is old, unless this is its first window."""
        views = self._views.setdefault((link.tenant, link.drafter), {})
        view = views.get(window.source)
        if view is None:
            counted = 0 if window.number == 1 else link.losses
            view = views[window.source] = _View(link.workers, link.losses, counted)
        view.workers, view.losses, view.silent = link.workers, link.losses, 0

    def close(self, now: float) -> Mapping[Fleet, Pooled]:
        """All fleets that a replica tells of."""
        found = {}
        for fleet, views in list(self._views.items()):
            for source in [source for source, view in views.items() if view.silent >= SILENT_TICKS]:
                del views[source]
            if not views:
                del self._views[fleet]
                continue
            pooled = found[fleet] = Pooled(sum(view.workers for view in views.values()), _incidents(views))
            if pooled.incidents or not pooled.workers:
                self._troubled[fleet] = now
        self._troubled = {fleet: at for fleet, at in self._troubled.items() if now - at <= EXCUSED_S}
        return found

    @property
    def troubled(self) -> Mapping[Fleet, float]:
        """Those whose lost workers are excused at the moment."""
        return self._troubled


def _incidents(views: Mapping[str, _View]) -> int:
    """A worker is lost once, though each replica loses its connection, at this tick or the one after."""
    before, most = max(view.fresh for view in views.values()), 0
    for view in views.values():
        fresh = view.losses - view.counted
        most = max(most, fresh - (before - view.fresh))
        view.counted, view.fresh, view.silent = view.losses, fresh, view.silent + 1
    return most
