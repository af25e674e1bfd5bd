"""The replica's end of a draft link: one connection, whose worker may die, hang or be slow at any time.

A round waits at most min(3 x median, 100 ms) for its drafts. An answer that is late is not asked for again:
until it arrives, or the worker has been silent for too long, rounds do not draft. The median is that of
answers that had to be computed: those made ahead come at once, and would make it impatient with the others.
Time is the injected clock's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from gammaray.actors.link.channel import Channel, ChannelLost
from gammaray.actors.link.frames import (
    Asked,
    Hello,
    Kind,
    MalformedFrame,
    Reader,
    Trees,
    Update,
    pack_draft,
    pack_hello,
    pack_text,
    read_trees,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds, except where named otherwise."""

    patience_s: float = 0.1  # at most, for an answer
    medians: float = 3.0  # of the usual round trip, for an answer
    least_s: float = 0.005  # ... but not less: a moment in which the machine did something else
    silence_s: float = 2.0  # without a sign of life from a worker that was asked for one: it is lost
    beat_s: float = 1.0  # between two pings of an idle link
    retry_s: float = 0.1  # until the first attempt to connect again; doubles
    longest_retry_s: float = 5.0
    late_rounds: int = 3  # late answers in a row, after which the link rests for a while
    rest_s: float = 1.0  # doubles
    longest_rest_s: float = 30.0


LIMITS = Limits()
MOST_FRAMES = 64  # taken in at once; a worker sends one for each that it got


class Link:
    """`open` connects, and may take until `silence_s`: only `keep` calls it, on a thread of its own.

    Everything else is called under `lock` (by RemoteDrafter), and never blocks but in `answer`.
    """

    def __init__(
        self,
        open: Callable[[], Channel],
        hello: Hello,
        limits: Limits = LIMITS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.lock = threading.RLock()
        self.generation = 0  # of connections; every loss begins a new one
        self.losses = self.late = 0
        self.closed = False
        self._open, self._hello, self._limits, self._clock = open, hello, limits, clock
        self._channel: Channel | None = None
        self._number = 0
        self._waiting: tuple[int, float] | None = None  # number and time of what was not answered yet
        self._arrived: tuple[int, Trees] | None = None  # the last answer, perhaps taken in by `keep`
        self._heard = self._retry_at = self._rest_until = 0.0
        self._failed = self._late_in_row = 0
        self._trips: deque[float] = deque(maxlen=64)
        self._on_trees: Callable[[Trees], None] = lambda trees: None

    # The engine's thread -----------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        return self._channel is not None

    @property
    def resting(self) -> bool:
        """Its answers were late too often: it is left alone for a while."""
        return self._clock() < self._rest_until

    @property
    def patience_s(self) -> float:
        """How long an answer is waited for."""
        limits = self._limits
        usual = limits.medians * median(self._trips) if self._trips else limits.patience_s
        return min(limits.patience_s, max(limits.least_s, usual))

    def ready(self) -> bool:
        """Whether it may be asked now. Takes in what came late."""
        self._absorb(self._clock())
        return self.up and self._waiting is None and not self.resting

    def ask(self, updates: Sequence[Update], asked: Sequence[Asked]) -> int | None:
        """The number of the answer to wait for; None when the worker is lost."""
        self._number += 1
        if not self._send(pack_draft(self.generation, self._number, updates, asked)):
            return None
        self._waiting = self._number, self._clock()
        return self._number

    def answer(self, number: int, deadline: float) -> Trees | None:
        """None: late or lost. `deadline` is on the clock."""
        found = None
        if self._waiting is not None and self._waiting[0] == number:
            self._absorb(min(deadline, self._waiting[1] + self.patience_s), number)
        if self._arrived is not None and self._arrived[0] == number:
            found, self._arrived = self._arrived[1], None
        if found is not None:
            self._late_in_row = 0
            return found
        self.late += self.up
        self._late_in_row += 1
        if self._late_in_row >= self._limits.late_rounds:
            doubled = self._limits.rest_s * 2 ** min(16, self._late_in_row - self._limits.late_rounds)
            rest_s = min(self._limits.longest_rest_s, doubled)
            self._rest_until = self._clock() + rest_s
            limit_ms = 1000 * self._limits.patience_s
            text = "drafts of %r were late %d times in a row (a round waits at most %.0f ms): none for %g s"
            log.warning(text, self._hello.drafter, self._late_in_row, limit_ms, rest_s)
        return None

    def drop(self, reason: str) -> None:
        """The connection is over; `keep` opens another."""
        if self._channel is None:
            return
        with suppress(OSError):
            self._channel.close()
        self._channel, self._waiting, self._arrived = None, None, None
        self.generation += 1
        self._retry_at = self._clock() + self._limits.retry_s
        if not self.closed:
            self.losses += 1
            name = self._hello.drafter
            log.warning("draft worker of %r lost (%s); its requests decode plainly", name, reason)

    # A thread of its own -----------------------------------------------------------------------------

    def keep(self) -> None:
        """Connects, sends a sign of life, and notices when none comes back. To be called again and again."""
        if not self.up:
            if not self.closed and self._clock() >= self._retry_at:
                self._connect()
            return
        with self.lock:
            self._absorb(self._clock())
            now = self._clock()
            if (
                self._waiting is not None
                and now - max(self._heard, self._waiting[1]) >= self._limits.silence_s
            ):
                self.drop("it is silent")
            elif self._waiting is None and now - self._heard >= self._limits.beat_s:
                self._number += 1
                if self._send(pack_text(Kind.PING, self.generation, self._number)):
                    self._waiting = self._number, now

    def close(self) -> None:
        """For good."""
        with self.lock:
            self.closed = True
            self.drop("it is no longer in the pool")

    def _connect(self) -> None:
        try:
            channel = self._open()
        except ChannelLost:
            self._retry_later()
            return
        try:
            channel.send(pack_hello(self._hello, self.generation))
            frame = channel.receive(self._clock() + self._limits.silence_s)
            reader = Reader(frame) if frame is not None else None
            if reader is None or reader.kind is not Kind.WELCOME:
                refusal = reader.raw().decode("utf-8", "replace") if reader else "it does not answer"
                raise ChannelLost(refusal)
        except (ChannelLost, MalformedFrame) as error:
            channel.close()
            self._retry_later()
            log.warning("draft worker of %r not reached: %s", self._hello.drafter, error)
            return
        with self.lock:
            if self.closed:  # meanwhile
                channel.close()
                return
            self._heard = self._clock()
            self._trips.clear()
            self._channel = channel

    def _retry_later(self) -> None:
        self._failed += 1
        doubled = self._limits.retry_s * 2 ** min(self._failed, 16)
        self._retry_at = self._clock() + min(self._limits.longest_retry_s, doubled)

    # Frames ------------------------------------------------------------------------------------------

    def _send(self, frame: bytes) -> bool:
        try:
            if self._channel is not None:
                self._channel.send(frame)
        except ChannelLost as error:
            self.drop(str(error))
        return self.up

    def _absorb(self, until: float, number: int | None = None) -> None:
        """Takes in every frame that is there; waits until `until` for the answer `number`."""
        try:
            for _ in range(MOST_FRAMES):
                if self._channel is None or (frame := self._channel.receive(until)) is None:
                    return
                self._take(Reader(frame))
                if self._arrived is not None and self._arrived[0] == number:
                    return
            raise ChannelLost("it sends what nobody asked for")
        except (ChannelLost, MalformedFrame) as error:
            self.drop(str(error))

    def _take(self, reader: Reader) -> None:
        """Answers to what is not waited for, twice or of another generation, only count as a sign of life."""
        self._heard = self._clock()
        if self._waiting is None or (reader.generation, reader.number) != (self.generation, self._waiting[0]):
            return
        _, sent = self._waiting
        self._waiting = None
        if reader.kind is not Kind.TREES:
            return
        trees = read_trees(reader)
        self._failed = 0
        if self._late_in_row:
            self._trips.clear()  # what is usual has changed
        if trees.hits < len(trees.trees):
            self._trips.append(self._heard - sent)
        self._arrived = reader.number, trees
        self._on_trees(trees)

    def on_trees(self, listener: Callable[[Trees], None]) -> None:
        """Also hears of answers that came too late."""
        self._on_trees = listener
