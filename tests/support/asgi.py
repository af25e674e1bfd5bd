"""Clients that talk to an ASGI application in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx


def connect(app: Any, key: str | None = None) -> httpx.AsyncClient:
    """An ordinary client; `key`: its API key."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)


class Browser:
    """Sends one POST. It leaves after `leave_after` messages of the response, or when `gone` is set.

    `parts`: the body as it comes; then `body` is not used. `stall_after`: reads so many messages, then
    no more. `endless`: the body's end never comes.
    """

    def __init__(
        self,
        app: Any,
        body: object = None,
        leave_after: int | None = None,
        spec_version: str = "2.3",
        parts: Sequence[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        stall_after: int | None = None,
        endless: bool = False,
    ) -> None:
        self.app, self.leave_after, self.spec_version = app, leave_after, spec_version
        self.parts = [json.dumps(body).encode()] if parts is None else list(parts)
        self.headers = {"content-type": "application/json", **(headers or {})}
        self.stall_after, self.endless = stall_after, endless
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.asked = 0

    async def receive(self) -> dict[str, Any]:
        if self.asked < len(self.parts):
            self.asked += 1
            more = self.endless or self.asked < len(self.parts)
            return {"type": "http.request", "body": self.parts[self.asked - 1], "more_body": more}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if self.stall_after is not None and len(self.sent) > self.stall_after:
            await asyncio.Event().wait()
        if self.leave_after is not None and len(self.sent) > self.leave_after:
            self.gone.set()
            if self.spec_version >= "2.4":
                raise OSError("connection lost")

    async def visit(self, path: str) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": self.spec_version},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()],
        }
        await self.app(scope, self.receive, self.send)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def content(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)
