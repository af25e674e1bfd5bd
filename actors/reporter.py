"""A replica's line to the controller: tells what its engine did, and hears what that may do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from gammaray.routing.bulletin import Answer, Origin
from gammaray.routing.window import Collector, Window
from gammaray.types import DraftLinks, PolicySnapshot, StepReport

logger = logging.getLogger(__name__)

POLL_S = 1.0
LEAD_S = 0.3  # a window leaves so long before a tick, and its policy is asked for so long after it
STOP_S = 2.0
LEFT_MOST = 2  # windows that may be on their way; while nobody takes them, the next one grows


class Desk(Protocol):
    """What a replica asks of the controller."""

    def tell(self, origin: Origin, windows: tuple[Window, ...]) -> Answer:
        """Raises anything when there is no answer: the windows may have come through, or not."""
        ...


class Reporter:
    """`add` from the engine's thread; everything else happens in `round`, which one thread calls.

    A window leaves just before the controller's next tick, so that this one knows what happened; one that the
    controller has not kept is sent again, with its number. Without a controller the last policy stays.
    """

    def __init__(
        self,
        origin: Origin,
        desk: Desk,
        apply: Callable[[PolicySnapshot], None],
        links: Callable[[], tuple[DraftLinks, ...]],
        interval_s: float,
    ) -> None:
        self._origin, self._desk = origin, desk
        self._apply, self._links = apply, links
        self._interval_s = interval_s
        self._collector, self._lock = Collector(origin.source), threading.Lock()
        self._left: list[Window] = []  # not kept yet, oldest first
        self._due = self._tick = 0.0
        self._version: int | None = None  # of the policy that the engine has

    def add(self, report: StepReport) -> None:
        with self._lock:
            self._collector.add(report)

    def round(self, now: float) -> None:
        """Sends what is due by `now` (s), or only asks. Raises what the controller's desk raises."""
        windows: tuple[Window, ...] = ()
        if now >= self._due:
            self._due = now + self._interval_s
            self._take()
            windows = tuple(self._left)
        answer = self._desk.tell(self._origin, windows)
        if answer.tick_in_s:
            self._tick = now + answer.tick_in_s
            before = self._tick - LEAD_S
            self._due = before if before > now else before + self._interval_s
        self._left = [window for window in self._left if window.number > answer.kept]
        if answer.policy.version != self._version:
            self._version = answer.policy.version
            self._apply(answer.policy)

    def pause(self, now: float) -> float:
        """Seconds until the next round: often enough to hear of an operator, and around the tick."""
        moments = (moment - now for moment in (self._due, self._tick + LEAD_S))
        return min([POLL_S, *(left for left in moments if left > 0)])

    def finish(self) -> None:
        """Once, at the end: sends everything that is left. Raises like `round`."""
        self._left.append(self._window())
        self._desk.tell(self._origin, tuple(self._left))

    def _take(self) -> None:
        if len(self._left) < LEFT_MOST:
            self._left.append(self._window())

    def _window(self) -> Window:
        links = self._links()
        with self._lock:
            return self._collector.take(links)


class ReportingThread:
    """Rounds of a reporter, at least one a second, until `stop`."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter, self._stopping = reporter, threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """What the engine has done since the last window is told once, if somebody listens."""
        self._stopping.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        silent = False
        while not self._stopping.wait(self._reporter.pause(time.monotonic())):
            try:
                self._reporter.round(time.monotonic())
                if silent:
                    logger.info("the controller is back")
                silent = False
            except Exception as error:
                if not silent:
                    logger.warning("no controller (%s): the last policy stays", type(error).__name__)
                silent = True
        with suppress(Exception):
            self._reporter.finish()
