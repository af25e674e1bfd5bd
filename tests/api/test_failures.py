"""Engine failures and clients that leave, on every path."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from support.asgi import Browser

from gammaray.errors import EngineFailure, InvalidRequest, Overloaded

pytestmark = pytest.mark.anyio
TEXT = {"model": "tiny", "prompt": "hi"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (InvalidRequest("too long", param="prompt"), 400),
        (Overloaded("full", retry_after=2.4), 503),
        (EngineFailure("bad step"), 500),
        (RuntimeError("secret detail"), 500),
    ],
)
async def test_failure_before_the_first_chunk_keeps_its_status(
    http: httpx.AsyncClient, engine, failure, status, stream
) -> None:
    engine.fail_at = {0: failure}
    response = await http.post("/v1/completions", json=TEXT | {"stream": stream})
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in response.text
    assert response.headers.get("retry-after") == ("3" if status == 503 else None)


@pytest.mark.parametrize("failure", [EngineFailure("bad step"), RuntimeError("secret detail")])
async def test_failure_in_a_stream_is_the_last_event(http: httpx.AsyncClient, engine, failure) -> None:
    engine.fail_at = {2: failure}
    response = await http.post("/v1/completions", json=TEXT | {"stream": True})
    assert response.status_code == 200
    events = response.text.strip().split("\n\n")
    assert len(events) == 3
    assert json.loads(events[-1].removeprefix("data: "))["error"]["type"] == "internal_error"
    assert "secret" not in response.text


@pytest.mark.parametrize("finish", ["error", "abort"])
async def test_a_sequence_that_ends_badly_is_a_500(http: httpx.AsyncClient, engine, finish) -> None:
    engine.finish = finish
    assert (await http.post("/v1/completions", json=TEXT)).status_code == 500


async def test_failure_of_one_prompt_aborts_the_others(http: httpx.AsyncClient, engine) -> None:
    generate = engine.generate

    def second_fails(request):
        if request.request_id.endswith("-1"):
            raise EngineFailure("second")
        return generate(request)

    engine.generate = second_fails
    engine.stop_at = 1
    response = await http.post("/v1/completions", json=TEXT | {"prompt": ["a", "b", "c"]})
    assert response.status_code == 500
    assert sorted(name[-1] for name in engine.aborted) == ["0", "2"]


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_leaving_mid_stream_aborts_every_sequence(app, engine, spec_version) -> None:
    browser = Browser(app, TEXT | {"stream": True, "n": 2, "prompt": ["a", "b"]}, 2, spec_version)
    engine.stop_at = 2
    await browser.visit("/v1/completions")
    assert len(engine.aborted) == 2
    assert not any(b"[DONE]" in message.get("body", b"") for message in browser.sent)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_chunk_aborts(app, engine, stream) -> None:
    engine.stop_at = 0
    browser = Browser(app, TEXT | {"stream": stream})
    visit = asyncio.create_task(browser.visit("/v1/completions"))
    while not engine.requests:
        await asyncio.sleep(0)
    assert engine.aborted == []
    browser.gone.set()
    await visit
    assert len(engine.aborted) == 1


async def test_cancelling_the_request_task_aborts(app, engine) -> None:
    engine.stop_at = 1
    visit = asyncio.create_task(Browser(app, TEXT | {"stream": True}).visit("/v1/completions"))
    while not engine.requests:
        await asyncio.sleep(0)
    visit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await visit
    assert len(engine.aborted) == 1


async def test_a_finished_stream_aborts_nothing(app, engine) -> None:
    browser = Browser(app, TEXT | {"stream": True, "n": 2})
    await browser.visit("/v1/completions")
    assert engine.aborted == []
    assert any(b"[DONE]" in message.get("body", b"") for message in browser.sent)
