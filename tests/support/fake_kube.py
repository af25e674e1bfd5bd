"""A fake Kubernetes API server on a port of this machine: enough for Helm and kubectl; nothing runs there."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from support.kube_store import KINDS, FakeKube, Refused, Request, plural

OPENAPI = b"\x0a\x032.0"  # protobuf of {swagger: "2.0"}: clients then check nothing by themselves
START_S = 10.0
Started = Future[tuple[int, Callable[[], Any]]]  # the port, and what ends the server


@contextmanager
def fake_kube(folder: Path, namespace: str, *without: str) -> Iterator[tuple[FakeKube, Path]]:
    """The cluster, with that namespace, and a kubeconfig. It serves no group in `without`."""
    served = {version: kinds for version, kinds in KINDS.items() if version.split("/")[0] not in without}
    kube = FakeKube({version: {plural(kind): kind for kind in served[version].split()} for version in served})
    about = json.dumps({"metadata": {"name": namespace}}).encode()
    kube.answer(Request("POST", "/api/v1/namespaces", {}, "application/json", about))
    started: Started = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(kube, started)), daemon=True)
    thread.start()
    port, stop = started.result(START_S)
    try:
        yield kube, _kubeconfig(folder, port)
    finally:
        stop()
        thread.join(START_S)


async def _serve(kube: FakeKube, started: Started) -> None:
    app = web.Application(client_max_size=2**24)

    async def answer(request: web.Request) -> web.StreamResponse:
        return await _answer(kube, request)

    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    over = asyncio.Event()
    stop = partial(asyncio.get_running_loop().call_soon_threadsafe, over.set)
    started.set_result((int(runner.addresses[0][1]), stop))
    await over.wait()
    await runner.cleanup()


async def _answer(kube: FakeKube, request: web.Request) -> web.StreamResponse:
    if request.path == "/openapi/v2":
        return web.Response(body=OPENAPI)
    query, body = dict(request.query), await request.read()
    try:
        if "sendInitialEvents" in query:  # clients then list first, as with older servers
            raise Refused(422, "Invalid", "sendInitialEvents is forbidden")
        answer = kube.answer(Request(request.method, request.path, query, request.content_type, body))
    except Refused as refused:
        return web.json_response(refused.status, status=refused.code)
    if query.get("watch") in ("true", "1"):
        return await _watch(request, answer["items"])
    if request.path.endswith("/log"):
        return web.Response(text="")
    return web.json_response(answer, status=201 if request.method == "POST" else 200)


async def _watch(request: web.Request, items: list[Any]) -> web.StreamResponse:
    """What there is, then silence until the client leaves: nothing changes by itself here."""
    stream = web.StreamResponse(headers={"Content-Type": "application/json"})
    with suppress(ConnectionResetError):
        await stream.prepare(request)
        for held in items:
            await stream.write(json.dumps({"type": "ADDED", "object": held}).encode() + b"\n")
        await asyncio.Event().wait()
    return stream


def _kubeconfig(folder: Path, port: int) -> Path:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "nobody"}}],
    }
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(content))
    file.chmod(0o600)
    return file
