"""How an ingress comes to its end: first it takes no new requests, then it ends those still open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from gammaray.api import errors
from gammaray.api.client import EngineClient
from gammaray.api.gate import route_path
from gammaray.errors import Overloaded
from gammaray.types import GenerateRequest, Health, ModelInfo, TokenChunk

RETRY_AFTER_S = 5.0  # another server may take over; this one does not come back by itself
COUNTED = "/v1/"
REFUSED = (COUNTED, "/readyz")  # the rest tells how the server is, to its end


class Drain:
    """State of one ingress; its event loop calls it. `open` counts HTTP requests."""

    def __init__(self) -> None:
        self.open = 0
        self.closed = False
        self._over = False
        self._waiting: set[asyncio.Timeout] = set()

    def close(self) -> None:
        """No new requests from now on."""
        self.closed = True

    def cut(self) -> None:
        """Ends what is open with an error that its client can read."""
        self.closed = self._over = True
        now = asyncio.get_running_loop().time()
        for timer in self._waiting:
            timer.reschedule(now)

    @asynccontextmanager
    async def until_cut(self) -> AsyncIterator[None]:
        """What runs inside is cancelled by `cut`. Raises Overloaded then."""
        if self._over:
            raise stopping("the server stopped before this request was done")
        timer = asyncio.timeout(None)
        try:
            async with timer:
                self._waiting.add(timer)
                yield
        except TimeoutError:
            if timer.expired():
                raise stopping("the server stopped before this request was done") from None
            raise
        finally:
            self._waiting.discard(timer)


def stopping(message: str) -> Overloaded:
    return Overloaded(message, retry_after=RETRY_AFTER_S, code="shutting_down")


class Entrance:
    """ASGI: counts the requests inside, and refuses new ones once the drain is closed."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app, self._drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = route_path(scope)
        if self._drain.closed and path.startswith(REFUSED):
            error = stopping("the server is shutting down and takes no new requests")
            return await errors.response(error, scope)(scope, receive, send)
        counted = path.startswith(COUNTED)
        self._drain.open += counted
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.open -= counted


class EndingClient:
    """An EngineClient whose streams end with an error when the drain cuts them."""

    def __init__(self, inner: EngineClient, drain: Drain) -> None:
        self._inner, self._drain = inner, drain

    async def info(self) -> ModelInfo:
        return await self._inner.info()

    async def health(self) -> Health:
        return await self._inner.health()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        async with aclosing(self._inner.generate(request)) as stream:
            while True:
                async with self._drain.until_cut():
                    chunk = await anext(stream, None)
                if chunk is None:
                    return
                yield chunk
