"""A tenant's limits, counted in this process but for tokens of a day. One event loop calls it: no locks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gammaray.config import Limits
from gammaray.errors import RateLimited

MINUTE_S = 60.0
SLOT_WAIT_S = 1.0  # nobody knows when an open request ends


class Limiter:
    """A sliding window: never more than `requests_per_minute` in any 60 s.

    `clock` in seconds, `wall` in seconds of Unix time. `limits` may change at any time. `used_until`: the
    tokens of all ingresses so far in the day that ends then (s, Unix), as the controller told last.
    """

    def __init__(
        self, limits: Limits, clock: Callable[[], float], wall: Callable[[], float] = time.time
    ) -> None:
        self.limits, self._clock, self._wall = limits, clock, wall
        self.used_until: tuple[int, float] = 0, 0.0
        self._starts: deque[float] = deque()  # of the last minute, oldest first
        self.open = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Counts one request for as long as it is open. Raises RateLimited, and counts nothing then."""
        self._check_open()
        self._check_day()
        self._check_minute()
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def _check_open(self) -> None:
        most = self.limits.max_concurrent
        if most is not None and self.open >= most:
            message = f"this tenant has {most} requests open, its limit; try again when one is done"
            raise RateLimited(message, retry_after=SLOT_WAIT_S, code="max_concurrent")

    def _check_day(self) -> None:
        most, (used, until), now = self.limits.tokens_per_day, self.used_until, self._wall()
        if most is not None and used >= most and now < until:
            message = f"this tenant used {used} tokens today (UTC), and its limit is {most}"
            raise RateLimited(message, retry_after=until - now, code="tokens_per_day")

    def _check_minute(self) -> None:
        most, now = self.limits.requests_per_minute, self._clock()
        if most is None:
            return
        while self._starts and now - self._starts[0] >= MINUTE_S:
            self._starts.popleft()
        if len(self._starts) >= most:
            wait = MINUTE_S - (now - self._starts[0])
            message = f"this tenant made {most} requests within a minute, its limit"
            raise RateLimited(message, retry_after=wait, code="requests_per_minute")
        self._starts.append(now)
