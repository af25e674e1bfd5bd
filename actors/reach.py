"""The draft workers of a replica's tenants, as drafters of its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from functools import partial

from gammaray.actors.link.pool import Member, PoolDrafter, over_sockets
from gammaray.actors.pool import Pool
from gammaray.engine.drafters.base import Drafter
from gammaray.types import DraftLinks

Resolve = Callable[[str, str], Sequence[Member]]


class Reach:
    """`drafters`: what `build_engine` asks for each pool. Links connect on threads of their own."""

    def __init__(self, pools: Iterable[Pool], resolve: Resolve) -> None:
        self._resolve = resolve
        self._made: dict[Pool, PoolDrafter] = {}
        self.drafters: Mapping[Pool, Callable[[int], Drafter]] = {p: partial(self._make, p) for p in pools}

    def links(self) -> tuple[DraftLinks, ...]:
        return tuple(DraftLinks(*pool, *astuple(made.counts())) for pool, made in sorted(self._made.items()))

    def _make(self, pool: Pool, vocab_size: int) -> Drafter:
        drafter = PoolDrafter(partial(self._resolve, *pool), over_sockets(pool[1], vocab_size), vocab_size)
        self._made[pool] = drafter
        drafter.start()
        return drafter


def reach(pools: Iterable[Pool], resolve: Resolve | None) -> Reach:
    """`resolve` None: there are no pools."""
    return Reach(pools if resolve else (), resolve or (lambda tenant, drafter: ()))
