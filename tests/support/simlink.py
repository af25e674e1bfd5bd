"""A draft worker on a simulated device of its own, behind a simulated link: exact times, any fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from gammaray.actors.link.channel import ChannelLost
from gammaray.actors.link.client import LIMITS, Limits, Link
from gammaray.actors.link.frames import Hello
from gammaray.actors.link.remote import RemoteDrafter
from gammaray.actors.link.server import DraftServer, Framed
from gammaray.engine.drafters.base import Drafter
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.sim import Language, SimClock, SimDevice, StepCost

NAME, SECRET = "small", b"secret"


class Dialect(Language):
    """A language that agrees with another the more often the smaller `noise` is."""

    def __init__(self, other: Language, noise: float, seed: int = 1) -> None:
        super().__init__(other.vocab_size, other.max_model_len)
        draws = np.random.default_rng(seed).standard_normal(tuple(other._rows.shape), dtype=np.float32)
        self._weights, self._rows = other._weights, other._rows + noise * torch.from_numpy(draws)


@dataclass
class Faults:
    """What goes wrong from now on."""

    dead: bool = False
    stopped: bool = False  # SIGSTOP: bytes are taken, nothing is done
    slow_s: float = 0.0  # added to each answer
    spoil: Callable[[bytes], list[bytes]] = field(default=lambda frame: [frame])  # of answers


class SimWorker:
    """Runs a DraftServer in the time of its own clock, as far as somebody looks."""

    def __init__(self, drafter: Drafter, clock: SimClock, vocab_size: int, latency_s: float = 0.0) -> None:
        self.clock, self.latency_s = clock, latency_s
        self.server = DraftServer(drafter, vocab_size, NAME, SECRET, clock)
        self.faults = Faults()
        self.clients = 0
        self.inbox: list[tuple[float, Framed]] = []
        self.outbox: list[tuple[float, Framed]] = []

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Everything that happens up to `until`, or until `done`."""
        while not done() and not self.faults.stopped and not self.faults.dead:
            due = min((arrival for arrival, _ in self.inbox), default=math.inf)
            if due <= self.clock():
                self._answer()
            elif self.server.wants_time() and self.clock() < min(due, until):
                self.server.draft_ahead()
            elif due <= until:
                self.clock.advance_to(due)
            else:
                return

    def _answer(self) -> None:
        here = [entry for entry in self.inbox if entry[0] <= self.clock()]
        self.inbox = [entry for entry in self.inbox if entry[0] > self.clock()]
        for client, frame in self.server.handle([framed for _, framed in here]):
            arrival = self.clock() + self.latency_s + self.faults.slow_s
            self.outbox += [(arrival, (client, part)) for part in self.faults.spoil(frame)]


class SimChannel:
    """One connection to a SimWorker, for a client with another clock."""

    def __init__(self, worker: SimWorker, clock: SimClock) -> None:
        if worker.faults.dead:
            raise ChannelLost("nobody there")
        self._worker, self._clock = worker, clock
        self._client, worker.clients = worker.clients, worker.clients + 1

    def send(self, frame: bytes) -> None:
        self._check()
        self._worker.inbox.append((self._clock() + self._worker.latency_s, (self._client, frame)))

    def receive(self, until: float) -> bytes | None:
        self._check()
        self._worker.run(max(until, self._clock()), lambda: self._arrival() <= until)
        arrival = self._arrival()
        self._clock.advance_to(min(arrival, until))
        if arrival > self._clock():
            return None
        found = next(e for e in self._worker.outbox if e[1][0] == self._client and e[0] == arrival)
        self._worker.outbox.remove(found)
        if not found[1][1]:
            raise ChannelLost("cut off")
        return found[1][1]

    def close(self) -> None:
        if not self._worker.faults.dead:
            self._worker.server.leave(self._client)

    def _arrival(self) -> float:
        mine = (arrival for arrival, (client, _) in self._worker.outbox if client == self._client)
        return min(mine, default=math.inf)

    def _check(self) -> None:
        if self._worker.faults.dead:
            raise ChannelLost("gone")


def draft_worker(
    language: Language, level_s: float, blocks: int = 4096, draft_sampling: bool = False
) -> SimWorker:
    """A model drafter whose every pass takes `level_s`, however many tokens it feeds."""
    clock = SimClock()
    device = SimDevice(language, clock, StepCost(((1_000_000, level_s),)), blocks)
    return SimWorker(ModelDrafter(device, draft_sampling), clock, language.vocab_size)


def remote(worker: SimWorker, clock: SimClock, limits: Limits = LIMITS) -> RemoteDrafter:
    """Connected."""
    hello = Hello(SECRET, worker.server._hello.vocab_size, NAME)
    drafter = RemoteDrafter(Link(lambda: SimChannel(worker, clock), hello, limits, clock), hello.vocab_size)
    drafter.keep()
    return drafter
