"""One drafter over the draft workers of a tenant's pool."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial

from gammaray.actors.link.channel import Address, connect
from gammaray.actors.link.client import LIMITS, Link
from gammaray.actors.link.frames import Hello
from gammaray.actors.link.remote import RemoteDrafter
from gammaray.engine.discreet import described
from gammaray.engine.drafters.base import Drafter
from gammaray.engine.drafters.switch import Switch

log = logging.getLogger(__name__)

KEEP_S = 0.05  # between two looks at a link
MEMBERS_S = 1.0  # between two looks at who is in the pool
NEAR_FIRST = 8  # sequences that the nearest worker gets before a farther one gets any


@dataclass(frozen=True, slots=True)
class Member:
    """A worker. One that drains keeps the sequences that it has, and gets no new ones."""

    address: Address
    distance: int = 0  # 0: the nearest
    draining: bool = False


def over_sockets(drafter: str, vocab_size: int) -> Callable[[Member], RemoteDrafter]:
    """How a replica reaches the workers of `drafter`."""

    def connected(member: Member) -> RemoteDrafter:
        hello = Hello(member.address.secret, vocab_size, drafter)
        return RemoteDrafter(Link(partial(connect, member.address, LIMITS.silence_s), hello), vocab_size)

    return connected


@dataclass(frozen=True, slots=True)
class Counts:
    """Since the start, but for `workers`, which are connected now, and those of them that rest."""

    workers: int = 0
    resting: int = 0
    losses: int = 0
    late: int = 0
    drafts: int = 0
    hits: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def _counts(worker: RemoteDrafter) -> Counts:
    link = worker.link
    return Counts(link.up, link.up and link.resting, link.losses, link.late, worker.drafts, worker.hits)


class PoolDrafter(Switch):
    """A sequence stays with its worker as long as that is there.

    `members` is asked again and again (see `start`; nothing runs by itself before). Who is no longer among
    them loses its sequences to the others.
    """

    def __init__(
        self,
        members: Callable[[], Sequence[Member]],
        connect: Callable[[Member], RemoteDrafter],
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(vocab_size)
        self._members, self._connect = members, connect
        self._pool: dict[Address, tuple[Member, RemoteDrafter]] = {}
        self._closed = threading.Event()
        self._before = Counts()  # of workers that are gone

    def choose(self, rid: str, salt: bytes) -> Drafter | None:
        """The nearest, as long as it has not many more sequences than others; of those the idlest."""
        present = self.chosen.get(rid)
        if isinstance(present, RemoteDrafter) and present.link.up:
            return present
        load = Counter(map(id, self.chosen.values()))

        def rank(entry: tuple[Member, RemoteDrafter]) -> tuple[int, int, int]:
            sequences = load[id(entry[1])]
            return sequences // NEAR_FIRST, entry[0].distance, sequences

        up = [(m, worker) for m, worker in self._pool.values() if worker.link.up and not m.draining]
        takes = [(m, worker) for m, worker in up if not worker.link.resting] or up
        return min(takes, key=rank)[1] if takes else None

    def counts(self) -> Counts:
        """Also from another thread."""
        workers = [worker for _, worker in self._pool.values()]
        return sum(map(_counts, workers), self._before)

    # Threads of its own ------------------------------------------------------------------------------

    def start(self) -> None:
        threading.Thread(target=self._watch, name="draft-pool", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        for _, worker in self._pool.values():
            worker.link.close()

    def refresh(self) -> list[RemoteDrafter]:
        """Takes in who is there now, and returns who is new."""
        members = {member.address: member for member in self._members()}
        fresh = {address: self._connect(m) for address, m in members.items() if address not in self._pool}
        gone = [worker for address, (_, worker) in self._pool.items() if address not in members]
        workers = {address: worker for address, (_, worker) in self._pool.items()} | fresh
        self._pool = {address: (member, workers[address]) for address, member in members.items()}
        for worker in gone:
            self._before += replace(_counts(worker), workers=0, resting=0)
            worker.link.close()
        return list(fresh.values())

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                fresh = self.refresh()
            except Exception as error:  # of whoever tells the members; the next time, perhaps
                log.error("the members of a draft pool are not known (%s)\n%s", *described(error))
                fresh = []
            for worker in fresh:
                threading.Thread(target=self._keep, args=(worker,), name="draft-link", daemon=True).start()
            self._closed.wait(MEMBERS_S)

    def _keep(self, worker: RemoteDrafter) -> None:
        while not self._closed.is_set() and not worker.link.closed:
            worker.keep()
            self._closed.wait(KEEP_S)
        worker.link.close()
