"""One drafter over the draft workers of every tenant's own pool."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gammaray.actors.link.channel import Address, connect
from gammaray.actors.link.client import LIMITS, Link
from gammaray.actors.link.frames import Hello
from gammaray.actors.link.remote import RemoteDrafter
from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket

KEEP_S = 0.05  # between two looks at a link
MEMBERS_S = 1.0  # between two looks at who is in the pools


@dataclass(frozen=True, slots=True)
class Member:
    """A worker. One that drains keeps the sequences that it has, and gets no new ones."""

    id: str
    address: Address
    draining: bool = False


Members = Mapping[str, Sequence[Member]]  # by tenant
Connect = Callable[[Member], RemoteDrafter]


def over_sockets(drafter: str, vocab_size: int) -> Connect:
    """How a replica reaches the workers of `drafter`."""

    def connected(member: Member) -> RemoteDrafter:
        hello = Hello(member.address.secret, vocab_size, drafter)
        return RemoteDrafter(Link(partial(connect, member.address, LIMITS.silence_s), hello), vocab_size)

    return connected


class PoolDrafter:
    """A sequence stays with its worker as long as that is there; a tenant never uses another's.

    `members` is asked again and again; it keeps the last answer when it does not know better. Nothing runs
    by itself until `start`.
    """

    def __init__(
        self, members: Callable[[], Members], connect: Connect, vocab_size: int | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self._members, self._connect = members, connect
        self._pools: dict[str, dict[str, tuple[Member, RemoteDrafter]]] = {}  # by tenant, by id
        self._worker_of: dict[str, RemoteDrafter] = {}
        self._closed = threading.Event()

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        groups: dict[RemoteDrafter, list[DraftView]] = {}
        for view in views:
            if worker := self._worker_of.get(view.rid):
                groups.setdefault(worker, []).append(view)
        return Ticket(tuple(views), [(worker, worker.begin(part)) for worker, part in groups.items()])

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        parts: list[tuple[RemoteDrafter, Ticket]] = ticket.payload  # type: ignore[assignment]
        return {rid: tree for worker, part in parts for rid, tree in worker.collect(part, deadline).items()}

    def commit(self, rid: str, tokens: Sequence[int], features: torch.Tensor | None = None) -> None:
        if worker := self._worker_of.get(rid):
            worker.commit(rid, tokens, features)

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        worker = self._worker_of.get(rid)
        if worker is None or not worker.link.up:
            self.release(rid)
            worker = self._choose(salt.decode())
        if worker is not None:
            self._worker_of[rid] = worker
            worker.catch_up(rid, tokens, salt)

    def release(self, rid: str) -> None:
        if worker := self._worker_of.pop(rid, None):
            worker.release(rid)

    def length(self, rid: str) -> int | None:
        worker = self._worker_of.get(rid)
        return worker.length(rid) if worker else None

    def _choose(self, tenant: str) -> RemoteDrafter | None:
        """The one with the fewest sequences."""
        load = Counter(self._worker_of.values())
        pool = self._pools.get(tenant, {}).values()
        takes = [worker for member, worker in pool if worker.link.up and not member.draining]
        return min(takes, key=lambda worker: load[worker], default=None)

    # Threads of their own ----------------------------------------------------------------------------

    def start(self) -> None:
        threading.Thread(target=self._watch, name="draft-pools", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        for pool in self._pools.values():
            for _, worker in pool.values():
                worker.link.close()

    def refresh(self) -> list[RemoteDrafter]:
        """Takes in who is there now, and returns who is new. Who left loses its sequences to the others."""
        fresh: list[RemoteDrafter] = []
        pools: dict[str, dict[str, tuple[Member, RemoteDrafter]]] = {}
        for tenant, members in self._members().items():
            before, pools[tenant] = self._pools.get(tenant, {}), {}
            for member in members:
                known = before.get(member.id)
                if known is not None and known[0].address == member.address:
                    pools[tenant][member.id] = member, known[1]
                else:
                    fresh.append(self._connect(member))
                    pools[tenant][member.id] = member, fresh[-1]
        gone = _workers(self._pools) - _workers(pools)
        self._pools = pools
        for worker in gone:
            worker.link.close()
        return fresh

    def _watch(self) -> None:
        while not self._closed.is_set():
            for worker in self.refresh():
                threading.Thread(target=self._keep, args=(worker,), name="draft-link", daemon=True).start()
            self._closed.wait(MEMBERS_S)

    def _keep(self, worker: RemoteDrafter) -> None:
        while not worker.link.closed:
            worker.keep()
            self._closed.wait(KEEP_S)


def _workers(pools: Mapping[str, Mapping[str, tuple[Member, RemoteDrafter]]]) -> set[RemoteDrafter]:
    return {worker for pool in pools.values() for _, worker in pool.values()}
