"""An ingress that comes to its end: what it refuses, what it counts, and how it ends what is open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from support.asgi import connect

from gammaray.api.app import create_app
from gammaray.api.drain import Drain, EndingClient
from gammaray.errors import Overloaded
from gammaray.routing.plan import Router
from gammaray.types import GenerateRequest

pytestmark = pytest.mark.anyio
TEXT = {"model": "tiny", "prompt": "hi"}


@pytest.fixture
def drain() -> Drain:
    return Drain()


@pytest.fixture
async def http(engine, tokenizer, config, drain: Drain) -> AsyncIterator[httpx.AsyncClient]:
    client = EndingClient(engine, drain)
    async with connect(create_app(client, tokenizer, Router(config), config, drain)) as http:
        yield http


async def until(reached: Callable[[], object]) -> None:
    while not reached():
        await asyncio.sleep(0)


async def test_open_requests_are_counted_and_probes_are_not(http: httpx.AsyncClient, engine, drain) -> None:
    engine.stop_at = 1
    asked = [asyncio.create_task(http.post("/v1/completions", json=TEXT | s)) for s in ({}, {"stream": True})]
    await until(lambda: len(engine.requests) == 2)
    await http.get("/healthz")
    assert drain.open == 2
    engine.go.set()
    await asyncio.gather(*asked)
    assert drain.open == 0


async def test_after_a_failure_too_a_request_is_no_longer_open(http: httpx.AsyncClient, drain) -> None:
    assert (await http.post("/v1/completions", json={})).status_code == 400
    assert drain.open == 0


async def test_a_closed_entrance_lets_open_requests_finish_and_refuses_new_ones(
    http: httpx.AsyncClient, engine, drain
) -> None:
    engine.stop_at = 1
    early = asyncio.create_task(http.post("/v1/completions", json=TEXT))
    await until(lambda: engine.requests)
    drain.close()
    late = await http.post("/v1/completions", json=TEXT)
    assert late.status_code == 503
    assert late.headers["retry-after"] == "5"
    assert late.json()["error"]["code"] == "shutting_down"
    assert (await http.get("/v1/models")).status_code == 503
    assert (await http.get("/readyz")).status_code == 503
    assert (await http.get("/healthz")).status_code == 200
    assert len(engine.requests) == drain.open == 1
    engine.go.set()
    assert (await early).status_code == 200


async def test_a_cut_closes_the_entrance_too(http: httpx.AsyncClient, drain) -> None:
    drain.cut()
    assert (await http.get("/v1/models")).status_code == 503


async def test_a_cut_stream_ends_with_an_error_event(http: httpx.AsyncClient, engine, drain) -> None:
    engine.stop_at = 2
    asked = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"stream": True, "n": 2}))
    await until(lambda: engine.requests)
    for _ in range(20):
        await asyncio.sleep(0)
    drain.cut()
    response = await asked
    events = [event.removeprefix("data: ") for event in response.text.strip().split("\n\n")]
    assert response.status_code == 200
    assert json.loads(events[0])["choices"][0]["text"] == "Hel"
    assert json.loads(events[-1])["error"] == {
        "message": "the server stopped before this request was done",
        "type": "overloaded_error",
        "param": None,
        "code": "shutting_down",
    }
    assert len(engine.aborted) == 1
    assert drain.open == 0


async def test_a_cut_answer_that_has_not_begun_is_a_503(http: httpx.AsyncClient, engine, drain) -> None:
    engine.stop_at = 1
    asked = asyncio.create_task(http.post("/v1/completions", json=TEXT))
    await until(lambda: engine.requests)
    drain.cut()
    response = await asked
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "shutting_down"
    assert len(engine.aborted) == 1


async def test_a_stream_that_is_not_waiting_is_cut_at_its_next_chunk(engine, drain) -> None:
    stream = EndingClient(engine, drain).generate(GenerateRequest("r", (1,)))
    await anext(stream)
    drain.cut()
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await anext(stream)
    assert engine.aborted == ["r"]


async def test_an_end_that_nobody_cuts_is_the_engines(engine, drain) -> None:
    """A time limit of somebody else's inside must not be taken for a cut."""
    engine.fail_at = {1: TimeoutError()}
    stream = EndingClient(engine, drain).generate(GenerateRequest("r", (1,)))
    await anext(stream)
    with pytest.raises(TimeoutError):
        await anext(stream)
