"""From a signal to the end: what is open finishes first, a second signal ends it at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any, Protocol

from gammaray.cluster import processes
from gammaray.config import Server

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.2
MARGIN_S = 15.0  # beyond the time that any request may take
CUT_S = 5.0  # for clients to read why their requests ended
IMPATIENT = 3  # signals


def drain_limit(server: Server) -> float:
    """Seconds that the longest request may still take."""
    return server.request_timeout_s + MARGIN_S


class Stopped(Exception):
    """A signal asks for the end."""


class Signals:
    """Counts SIGINT, SIGTERM and SIGHUP, and raises nothing: no exception comes in the middle of Ray's code,
    which would lose it or leave processes behind. When the third comes, nothing is waited for any more.
    """

    def __init__(self) -> None:
        self.count = 0
        self._installed = False

    def install(self) -> None:
        """What is ignored stays so."""
        self._installed = True
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def check(self) -> None:
        """Raises Stopped once there was a signal."""
        if self.count:
            raise Stopped

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Ray's driver has a handler of its own for SIGTERM, and its core prints a stack."""
        utils: Any = import_module("ray._private.utils")
        original = utils.set_sigterm_handler
        if self._installed:
            utils.set_sigterm_handler = lambda handler: None
        try:
            yield
        finally:
            utils.set_sigterm_handler = original
            if self._installed:
                self.install()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Nothing here takes a lock, which the interrupted code might hold.
        self.count += 1
        signal.alarm(0)  # a handler of Ray's core that came first would abort the process after 3 s
        if self.count >= IMPATIENT:
            processes.kill(processes.descendants())
            os._exit(1)


class Entrances(Protocol):
    """All ingress replicas together."""

    def drain(self) -> int:
        """No new requests from now on; how many are open."""
        ...

    def cut(self) -> None:
        """Ends the open ones with an error."""
        ...


def drain(
    entrances: Entrances,
    limit_s: float,
    again: Callable[[], bool],
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Waits until no request is open, for `limit_s` at most or until there was a signal `again`.

    Returns how many requests had to be cut off.
    """
    deadline = clock() + limit_s
    left = entrances.drain()
    if left:
        say(f"draining: {requests(left)} open, new ones get 503; signal again to stop now")
    while left and clock() < deadline and not again():
        sleep(POLL_S)
        left = entrances.drain()
    if left:
        entrances.cut()
        deadline = clock() + CUT_S
        while entrances.drain() and clock() < deadline:
            sleep(POLL_S)
        sleep(POLL_S)  # the last bytes are on their way through Serve's proxy
    return left


def requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"


class ServeEntrances:
    """The ingress deployment of an application. A replica that is gone has nothing open."""

    def __init__(self, application: str) -> None:
        from ray import serve

        self._handle: Any = serve.get_app_handle(application)
        self._open = 0

    def drain(self) -> int:
        """As last heard when the deployment does not answer in time."""
        with suppress(Exception):  # whatever Ray raises then
            self._open = sum(count for count in self._all("drain") if isinstance(count, int))
        return self._open

    def cut(self) -> None:
        with suppress(Exception):
            self._all("cut")

    def _all(self, method: str) -> list[Any]:
        results: list[Any] = self._handle.broadcast(method).results(timeout_s=CUT_S, return_exceptions=True)
        return results
