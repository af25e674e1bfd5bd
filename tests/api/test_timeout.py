"""A request's time covers all of it, and its end aborts the request in the engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from support.asgi import Browser, connect

from gammaray.api.gate import GRACE_S

pytestmark = pytest.mark.anyio
TEXT = {"model": "tiny", "prompt": "hi"}
MINUTE = TEXT | {"timeout": 60}


@pytest.fixture
async def jump() -> AsyncIterator[Callable[[float], None]]:
    """Moves the clock of the event loop forward, by seconds."""
    loop = asyncio.get_running_loop()
    real, ahead = loop.time, [0.0]
    loop.time = lambda: real() + sum(ahead)  # type: ignore[method-assign]
    yield ahead.append
    loop.time = real  # type: ignore[method-assign]


async def until(reached: Callable[[], object]) -> None:
    while not reached():
        await asyncio.sleep(0)


def timed_out(response: httpx.Response) -> str:
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (408, "timeout_error", "timeout")
    assert error["code"] == "timeout"
    return error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_chunk_it_is_a_408(http: httpx.AsyncClient, engine, jump, stream) -> None:
    engine.stop_at = 0
    request = asyncio.create_task(http.post("/v1/completions", json=MINUTE | {"stream": stream, "n": 2}))
    await until(lambda: engine.requests)
    jump(59)
    await asyncio.wait({request}, timeout=0.1)
    assert not request.done()
    jump(1)
    assert "60 s" in timed_out(await request)
    assert len(engine.aborted) == 1


async def test_a_whole_answer_is_not_cut(http: httpx.AsyncClient, engine, jump) -> None:
    engine.stop_at = 2
    request = asyncio.create_task(http.post("/v1/completions", json=MINUTE | {"prompt": ["a", "b"]}))
    await until(lambda: len(engine.requests) == 2)
    jump(60)
    timed_out(await request)
    assert len(engine.aborted) == 2


async def test_in_a_stream_it_is_the_last_event(app, engine, jump) -> None:
    engine.stop_at = 2
    browser = Browser(app, MINUTE | {"stream": True})
    visit = asyncio.create_task(browser.visit("/v1/completions"))
    await until(lambda: b"lo " in browser.content)
    jump(60)
    await visit
    events = browser.content.decode().strip().split("\n\n")
    assert browser.status == 200
    assert len(events) == 3
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "timeout"
    assert len(engine.aborted) == 1


async def test_chunks_that_wait_already_do_not_outrun_the_deadline(http, engine, jump) -> None:
    generate = engine.generate

    async def at_once(request):
        chunks = [chunk async for chunk in generate(request)]
        for chunk in chunks:
            yield chunk
        jump(60)

    engine.generate = at_once
    response = await http.post("/v1/completions", json=MINUTE | {"stream": True})
    assert response.text.count("data: ") == 2  # the chunk that was waited for, and the error
    assert '"code":"timeout"' in response.text


async def test_waiting_for_the_model_counts(http: httpx.AsyncClient, engine, jump) -> None:
    asked = asyncio.Event()

    async def never() -> None:
        asked.set()
        await asyncio.Event().wait()

    engine.info = never
    request = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"timeout": 2}))
    await asked.wait()
    jump(2)
    timed_out(await request)


async def test_reading_the_prompt_counts(http: httpx.AsyncClient, engine, tokenizer, jump) -> None:
    asked, go, encode = threading.Event(), threading.Event(), tokenizer.encode

    def slow(text: str, **options: bool) -> list[int]:
        asked.set()
        go.wait(30)
        return encode(text, **options)

    tokenizer.encode = slow
    request = asyncio.create_task(http.post("/v1/completions", json=MINUTE))
    await until(asked.is_set)
    jump(60)
    try:
        timed_out(await request)
    finally:
        go.set()
    assert engine.requests == []


async def test_the_server_has_a_limit_of_its_own(make_app, engine, jump) -> None:
    engine.stop_at = 0
    async with connect(make_app(server={"request_timeout_s": 20})) as http:
        for asked, given in (({}, 20), ({"timeout": 30}, 20), ({"timeout": 10}, 10)):
            engine.requests.clear()
            request = asyncio.create_task(http.post("/v1/completions", json=TEXT | asked))
            await until(lambda: engine.requests)
            jump(given)
            assert f"{given} s" in timed_out(await request)


async def test_a_wish_that_is_cut_is_noted(make_app) -> None:
    async with connect(make_app(server={"request_timeout_s": 20})) as http:
        for timeout, notes in ((30, ["timeout 30 was cut to 20 s, the limit of this server"]), (20, [])):
            answer = (await http.post("/v1/completions", json=TEXT | {"timeout": timeout})).json()
            assert answer["metrics"]["speculative_decoding"]["notes"] == notes


@pytest.mark.parametrize("timeout", [0, -1, "1", True, 1e9])
async def test_timeouts_that_are_none(http: httpx.AsyncClient, timeout) -> None:
    response = await http.post("/v1/completions", json=TEXT | {"timeout": timeout})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout")


async def test_a_body_that_never_ends_is_a_408(make_app, jump) -> None:
    browser = Browser(make_app(server={"request_timeout_s": 20}), parts=[b"{"], endless=True)
    visit = asyncio.create_task(browser.visit("/v1/completions"))
    await until(lambda: browser.asked)
    jump(20 + GRACE_S)
    await visit
    assert (browser.status, json.loads(browser.content)["error"]["code"]) == (408, "timeout")


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_a_reader_that_stops_is_cut_off(make_app, engine, jump, spec_version) -> None:
    engine.stop_at = 2
    app = make_app(server={"request_timeout_s": 20})
    browser = Browser(app, TEXT | {"stream": True}, spec_version=spec_version, stall_after=1)
    visit = asyncio.create_task(browser.visit("/v1/completions"))
    await until(lambda: len(browser.sent) > 1)
    jump(20 + GRACE_S)
    await visit
    assert (browser.status, len(browser.sent)) == (200, 2)
    assert len(engine.aborted) == 1
