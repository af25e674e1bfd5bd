"""A server with nothing but the live page, and a browser that visits it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.middleware import Middleware

from gammaray.api import errors
from gammaray.api.auth import fingerprint
from gammaray.api.dashboard import add_dashboard
from gammaray.api.drain import Drain, Entrance
from gammaray.api.gate import Gate, Record, RequestId
from gammaray.api.tenancy import Tenancy
from gammaray.config import parse

OPERATOR_KEY = "gr-operator"
INTERVAL_S = 0.1


class Source:
    """Tells `data`, and what it was asked to apply."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.applied: list[str] = []

    async def overview(self, limit: int) -> dict[str, Any]:
        return self.data | {"tenants": self.data["tenants"][:limit]}


def page_app(source: Source, drain: Drain, protect: bool = False, stream_s: float = 600) -> FastAPI:
    """`stream_s`: after which an event stream ends."""
    server = {
        "operator_keys": [{"name": "ops", "sha256": fingerprint(OPERATOR_KEY.encode())}],
        "protect_metrics": protect,
    }
    tenancy = Tenancy(parse({"target": {"model": "x"}, "server": server}, "test"))
    way_in = [Middleware(RequestId), Middleware(Record, seconds=stream_s, log=None)]
    way_in += [Middleware(Entrance, drain=drain), Middleware(Gate, tenancy=tenancy)]
    app = FastAPI(middleware=way_in, openapi_url=None, redirect_slashes=False)
    errors.install(app)
    add_dashboard(app, source, drain, INTERVAL_S)

    @app.get("/gammaray/v1/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/gammaray/v1/tenants/{tenant}/suggestion")
    async def apply(tenant: str) -> dict[str, str]:
        source.applied.append(tenant)
        return {}

    return app


@contextmanager
def serving(app: FastAPI, port: int = 0) -> Iterator[str]:
    """The address of `app` on `port` of this machine, 0: any one. In the end open streams break off."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
