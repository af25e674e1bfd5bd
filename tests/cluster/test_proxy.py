"""What stands before Serve's proxy: one request id, and no body beyond the limit."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.asgi import Browser

from gammaray.cluster import proxy
from gammaray.config import Server, load

MIB = 2**20


async def reader(scope, receive, send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.anyio
async def test_serve_finds_the_middlewares_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._common.utils import import_attr

    for name, value in proxy.environment(Server(max_body_bytes=7)).items():
        monkeypatch.setenv(name, value)
    app = reader
    for middleware in import_attr(proxy.environment(Server())[proxy.CALLBACK])():
        app = middleware.cls(app, **middleware.kwargs)
    long, short = (Browser(app, parts=[b"x" * size], headers={"x-request-id": "a b"}) for size in (8, 7))
    await long.visit("/")
    await short.visit("/")
    assert (long.status, short.status) == (413, 200)
    for browser in (long, short):
        ids = [value for name, value in browser.sent[0]["headers"] if name == b"x-request-id"]
        assert len(ids) == 1 and b" " not in ids[0]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.ray
@pytest.mark.parametrize("sent", [None, "mine", "not mine"])
def test_one_request_id(cluster, sent: str | None) -> None:
    response = httpx.get(f"{cluster.url}/healthz", headers={"x-request-id": sent} if sent else {})
    (got,) = response.headers.get_list("x-request-id")
    assert (got == sent) == (sent == "mine")


@pytest.mark.ray
def test_a_body_without_end_is_cut_off(cluster) -> None:
    limit, sent = load().server.max_body_bytes // MIB, 0

    def body() -> Iterator[bytes]:
        nonlocal sent
        for sent in range(1, 50 * limit):  # noqa: B007
            yield b"x" * MIB

    headers = {"content-type": "application/json"}
    response = httpx.post(f"{cluster.url}/v1/completions", content=body(), headers=headers, timeout=60)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert limit < sent < 10 * limit  # what the sockets hold, on top
