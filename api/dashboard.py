"""The live page: its files, and one overview after the other as server-sent events."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response

from gammaray.api import visit
from gammaray.api.auth import EVENTS
from gammaray.api.drain import Drain, stopping
from gammaray.api.respond import while_connected
from gammaray.api.stream import EventStream, event
from gammaray.errors import NotFound, Overloaded
from gammaray.telemetry import live
from gammaray.validation import shorten

INTERVAL_S = 2.0
LIMIT = 100  # tenants of an overview, the busiest
STREAMS = 32  # open at once
ANSWER_S = 5.0


class Overview(Protocol):
    """Whoever knows how the tenants are doing."""

    async def overview(self, limit: int) -> dict[str, Any]:
        """JSON with the `limit` busiest tenants. Raises GammarayError when nobody can tell."""
        ...


class Feed:
    """Asks the source once an interval, however many streams are open. One event loop uses it."""

    def __init__(self, source: Overview, drain: Drain, interval_s: float = INTERVAL_S) -> None:
        self._source, self._drain, self._interval_s = source, drain, interval_s
        self._asking = asyncio.Lock()
        self._newest, self._came = b"", -math.inf
        self.open = 0

    async def events(self, until: float) -> AsyncGenerator[bytes, None]:
        """An event now and after each interval, to the time `until` (s, of the loop's clock).

        Raises Overloaded when too many streams are open, when the source is silent, and at a drain.
        """
        loop = asyncio.get_running_loop()
        with self._slot():
            while not self._drain.closed:
                yield await self._event()
                if loop.time() + self._interval_s >= until:
                    return
                async with self._drain.until_cut():
                    await asyncio.sleep(self._interval_s)
            raise stopping("the server is shutting down")

    @contextmanager
    def _slot(self) -> Iterator[None]:
        if self.open >= STREAMS:
            raise Overloaded(f"{STREAMS} live pages are open, the most that this server feeds; close one")
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def _event(self) -> bytes:
        """The newest overview; another stream may have asked for it just before."""
        async with self._asking:
            now = asyncio.get_running_loop().time()
            if now - self._came >= self._interval_s / 2:
                self._newest, self._came = event(await self._ask()), now
            return self._newest

    async def _ask(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._source.overview(LIMIT) | {"limit": LIMIT}
        except TimeoutError:
            raise Overloaded(f"the overview was not there after {ANSWER_S:g} s; try again") from None


def add_dashboard(app: FastAPI, source: Overview, drain: Drain, interval_s: float = INTERVAL_S) -> None:
    """Adds `/dashboard`, its files and its events. A stream ends with its request's time; pages come back."""
    feed = Feed(source, drain, interval_s)

    @app.get("/dashboard", include_in_schema=False)
    async def page() -> Response:
        """The shell, which has no data."""
        return _file(live.INDEX)

    @app.get(EVENTS, include_in_schema=False)
    async def events(request: Request) -> Response:
        """The overview, again and again; behind `protect_metrics` for operators only."""
        stream = feed.events(visit.of(request.scope).deadline)
        try:
            return EventStream(await while_connected(request, _first(stream)), stream)
        except BaseException:  # the first event may have come in the moment that the client left
            await stream.aclose()
            raise

    @app.get("/dashboard/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        """A file of the page."""
        return _file(name)


async def _first(stream: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(stream)


def _file(name: str) -> Response:
    asset = live.assets().get(name)
    if asset is None:
        raise NotFound(f"the live page has no file {shorten(ascii(name))}", code="unknown_url")
    return Response(asset.content, media_type=asset.media_type, headers=live.HEADERS)
