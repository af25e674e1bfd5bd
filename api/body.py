"""Request bodies: not larger than allowed, and JSON that means one thing."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import jiter
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gammaray.api import errors
from gammaray.errors import TooLarge
from gammaray.validation import shorten

MAX_FAULT = 200  # characters


class BodyLimit:
    """ASGI: a body of more than `limit` bytes is a 413, before it is in memory.

    To the application inside, a body that grows too long is a client that left.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        wire = _Wire(receive, send, self._limit)
        if _declared(scope) > self._limit:
            wire.over = True
        else:
            await self._app(scope, wire.receive, wire.send)
        if wire.over and not wire.started:
            error = TooLarge(f"the body exceeds {self._limit} bytes, the limit of this server")
            await errors.response(error, scope)(scope, receive, send)


class _Wire:
    """One request's messages; `over`: its body was too long."""

    def __init__(self, receive: Receive, send: Send, limit: int) -> None:
        self._receive, self._send, self._left = receive, send, limit
        self.over = self.started = False

    async def receive(self) -> Message:
        message: Message = {"type": "http.disconnect"} if self.over else await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            self.over = True
        return {"type": "http.disconnect"} if self.over else message

    async def send(self, message: Message) -> None:
        if self.over and not self.started:
            return
        self.started = True
        await self._send(message)


def _declared(scope: Scope) -> int:
    length = Headers(scope=scope).get("content-length", "0")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0


def parse(content: bytes) -> Any:
    """The JSON value. Raises JSONDecodeError, also for what readers of JSON understand differently.

    That is a key that appears twice, NaN, and nesting beyond 200 levels.
    """
    try:
        return jiter.from_json(content, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="keys")
    except ValueError as error:
        raise json.JSONDecodeError(_fault(content, str(error)), "", 0) from None


def _fault(content: bytes, fault: str) -> str:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return f"it is no UTF-8 text from byte {error.start} on"
    return shorten(fault, MAX_FAULT)  # it may name a key


class StrictRoute(APIRoute):
    """A route whose body is read by `parse`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict


class _StrictRequest(Request):
    async def json(self) -> Any:
        return parse(await self.body())
