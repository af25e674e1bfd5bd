"""What stands before Serve's HTTP proxy, in a cluster of our own.

The proxy keeps a body in memory however long it is, and answers with any request id that it was sent.
"""

from __future__ import annotations

import os

from starlette.middleware import Middleware

from gammaray.api.body import BodyLimit
from gammaray.api.gate import RequestId
from gammaray.config import Server

CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
LIMIT = "GAMMARAY_MAX_BODY_BYTES"


def environment(server: Server) -> dict[str, str]:
    """Variables that make Serve's proxy call `middlewares`; to be set before Ray starts."""
    return {CALLBACK: f"{__name__}.{middlewares.__name__}", LIMIT: str(server.max_body_bytes)}


def middlewares() -> list[Middleware]:
    """Innermost first."""
    return [Middleware(BodyLimit, limit=int(os.environ[LIMIT])), Middleware(RequestId)]
