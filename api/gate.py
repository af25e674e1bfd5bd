"""What every request passes before its route: an id, a time limit, a key, the tenant's limits."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gammaray.api import errors, visit
from gammaray.api.log import AccessLog
from gammaray.api.tenancy import Tenancy
from gammaray.api.visit import Visit
from gammaray.errors import GammarayError

ID_HEADER = "x-request-id"
ID = re.compile("[A-Za-z0-9._-]{1,128}")
GENERATION = ("/v1/completions", "/v1/chat/completions")
GRACE_S = 5.0  # in which a route says itself, and better, that the time is over


# Tenant, method, route, status and seconds of a request that is over; None: unknown.
Tell = Callable[[str | None, str, str | None, int | None, float], None]


class RequestId:
    """ASGI: one id in the request's headers and the response's; the client's own if it is a plain word.

    `tell` False: somebody in front puts it into the response.
    """

    def __init__(self, app: ASGIApp, tell: bool = True) -> None:
        self._app, self._tell = app, tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        name = _request_id(Headers(scope=scope).getlist(ID_HEADER))
        MutableHeaders(scope=scope)[ID_HEADER] = name

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[ID_HEADER] = name
            await send(message)

        await self._app(scope, receive, named if self._tell else send)


def _request_id(sent: Sequence[str]) -> str:
    return sent[0] if len(sent) == 1 and ID.fullmatch(sent[0]) else secrets.token_hex(16)


class Record:
    """ASGI: follows a request to its end, which comes after `seconds`, writes its line, and tells of it.

    What fails inside and has no answer gets one here.
    """

    def __init__(self, app: ASGIApp, seconds: float, log: AccessLog | None, tell: Tell | None = None) -> None:
        self._app, self._seconds, self._log, self._tell = app, seconds, log, tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        arrived, clock = datetime.now(UTC), asyncio.get_running_loop().time
        seen = Visit(Headers(scope=scope)[ID_HEADER], clock(), self._seconds)
        scope[visit.KEY] = seen
        wire = _Wire(receive, send)
        try:
            await self._follow(scope, seen, wire)
        finally:
            route = getattr(scope.get("route"), "path", None)
            status = errors.GONE if wire.left_open(seen) else wire.status
            if self._tell:
                self._tell(seen.identity.tenant, scope["method"], route, status, clock() - seen.began)
            if self._log:
                http = {"method": scope["method"], "route": route, "status": status}
                self._log.write(seen, arrived, clock(), http, scope.get("path_params", {}).get("name"))

    async def _follow(self, scope: Scope, seen: Visit, wire: _Wire) -> None:
        try:
            async with asyncio.timeout_at(seen.deadline + GRACE_S) as timer:
                await self._app(scope, wire.receive, wire.send)
        except GammarayError as error:
            await wire.refuse(error, scope)
        except Exception as error:
            if timer.expired():
                await wire.refuse(seen.over(), scope)
            elif not wire.gone:
                await wire.refuse(errors.hide(error), scope)


class _Wire:
    """One request's messages, and what became of it."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.status: int | None = None
        self._complete = False
        self.gone = False

    def left_open(self, seen: Visit) -> bool:
        """The client did not wait for the end."""
        return self.gone or (not self._complete and seen.error is None)

    async def receive(self) -> Message:
        message = await self._receive()
        self.gone |= message["type"] == "http.disconnect" and not self._complete
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self._complete |= message["type"] == "http.response.body" and not message.get("more_body", False)
        try:
            await self._send(message)
        except OSError:
            self.gone = True
            raise

    async def refuse(self, error: GammarayError, scope: Scope) -> None:
        """Answers with an error; a response that has begun just ends, which its reader notices."""
        response = errors.response(error, scope)
        if self.status is None:
            await response(scope, self.receive, self.send)


class Gate:
    """ASGI: lets in who may ask for this, as often as the tenant may."""

    def __init__(self, app: ASGIApp, tenancy: Tenancy) -> None:
        self._app, self._tenancy = app, tenancy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        seen, path = visit.of(scope), route_path(scope)
        seen.identity = self._tenancy.admit(path, _authorization(scope))
        tenant = seen.identity.tenant if path in GENERATION else None
        with nullcontext() if tenant is None else self._tenancy.slot(tenant):
            await self._app(scope, receive, send)


def route_path(scope: Scope) -> str:
    """What the router compares: the path without the prefix of a proxy in front."""
    path, root = scope["path"], scope.get("root_path", "")
    return str(path[len(root) :] if root and path.startswith(f"{root}/") else path)


def _authorization(scope: Scope) -> list[bytes]:
    return [value for name, value in scope["headers"] if name.lower() == b"authorization"]
