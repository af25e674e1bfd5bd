"""The access log has one line for each request, whatever becomes of it, and no text unless allowed."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from pathlib import Path

import pytest
from support.asgi import Browser, connect

from gammaray.api.auth import fingerprint
from gammaray.errors import ConfigError, EngineFailure

pytestmark = pytest.mark.anyio
SECRET = "a secret prompt"
TEXT = {"model": "tiny", "prompt": SECRET}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}]}
ANSWER = "Hello wörld"
FIELDS = {
    "time",
    "request_id",
    "method",
    "route",
    "status",
    "tenant",
    "key",
    "model",
    "response_id",
    "prompt_tokens",
    "completion_tokens",
    "finish_reasons",
    "ttft_ms",
    "duration_ms",
    "error",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "access.jsonl"


@pytest.fixture
def logged(make_app, file):
    tenants = {"default": {}, "chat": {"api_keys": [{"name": "web", "sha256": fingerprint(b"gr-web")}]}}
    return make_app(server={"access_log": str(file)}, tenants=tenants)


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_ends_well(logged, file, stream) -> None:
    async with connect(logged, "gr-web") as http:
        response = await http.post("/v1/chat/completions", json=CHAT | {"n": 2, "stream": stream})
    (line,) = lines(file)
    assert set(line) == FIELDS
    assert line["request_id"] == response.headers["x-request-id"]
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (line["tenant"], line["key"], line["model"]) == ("chat", "web", "tiny")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (len(SECRET) + 1, 12)
    assert line["finish_reasons"] == ["stop", "stop"]
    assert line["response_id"].startswith("chatcmpl-") and line["response_id"] in response.text
    assert 0 <= line["ttft_ms"] <= line["duration_ms"]
    assert line["error"] is None
    assert datetime.fromisoformat(line["time"]).tzinfo is not None
    assert SECRET not in file.read_text() and "Hel" not in file.read_text()


@pytest.mark.parametrize("stream", [False, True])
async def test_texts_only_when_allowed(make_app, file, stream) -> None:
    app = make_app(server={"access_log": str(file)}, telemetry={"log_prompts": True})
    async with connect(app) as http:
        await http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        await http.post("/v1/completions", json=TEXT | {"stream": stream, "n": 2})
        await http.get("/healthz")
    chat, text, health = lines(file)
    assert (chat["prompt"], chat["texts"]) == ([{"role": "user", "content": SECRET}], [ANSWER])
    assert (text["prompt"], text["texts"]) == ([SECRET], [ANSWER, "Hel1lo 1wörld1"])
    assert (health["prompt"], health["texts"]) == (None, [])


async def test_what_is_refused(logged, file) -> None:
    async with connect(logged) as http:
        await http.get("/healthz")
        await http.get("/v1/models/tiny")
        await http.get("/nowhere/at%1Eall")
        await http.post("/v1/completions", json=TEXT | {"temperature": 9})
        await http.post("/v1/completions", json=TEXT | {"model": "x" * 500})
        await http.post("/v1/completions", content=b"{")
        await http.put("/healthz")
        await http.get("/v1/models", headers={"authorization": "Bearer gr-x"})
    assert [(li["route"], li["status"], li["error"], li["tenant"]) for li in lines(file)] == [
        ("/healthz", 200, None, None),
        ("/v1/models/{model:path}", 200, None, "default"),
        (None, 404, "unknown_url", None),
        ("/v1/completions", 400, "invalid_value", "default"),
        ("/v1/completions", 404, "model_not_found", "default"),
        ("/v1/completions", 400, "invalid_value", "default"),
        ("/healthz", 405, "method_not_allowed", None),
        (None, 401, "invalid_api_key", None),
    ]
    assert all(len(line) < 1000 for line in file.read_text().splitlines())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (EngineFailure("x"), "internal_error"),
        (EngineFailure("x", code="odd"), "odd"),
        (RuntimeError(SECRET), "internal_error"),
    ],
)
async def test_failures(logged, file, engine, failure, code, stream, caplog) -> None:
    engine.fail_at = {1: failure}
    async with connect(logged) as http:
        await http.post("/v1/completions", json=TEXT | {"stream": stream})
    (line,) = lines(file)
    assert (line["status"], line["error"]) == (200 if stream else 500, code)
    assert (line["completion_tokens"], line["finish_reasons"]) == (2, [None])
    assert SECRET not in caplog.text


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["leave", "cancel"])
async def test_a_client_that_leaves_is_499(logged, file, engine, way, stream, spec_version) -> None:
    engine.stop_at = 2
    browser = Browser(logged, TEXT | {"stream": stream}, spec_version=spec_version)
    visit = asyncio.create_task(browser.visit("/v1/completions"))
    while not (b"lo " in browser.content if stream else engine.requests):
        await asyncio.sleep(0)
    if way == "cancel":
        visit.cancel()
    else:
        browser.gone.set()
        if spec_version == "2.4" and stream:  # such a server says it with the next event
            browser.leave_after = len(browser.sent)
            engine.go.set()
    await asyncio.wait([visit])
    (line,) = lines(file)
    assert (line["status"], line["error"]) == (499, None)
    assert line["prompt_tokens"] == len(SECRET)
    assert line["completion_tokens"] >= (4 if stream else 0)


async def test_a_client_that_leaves_while_it_sends_is_499(logged, file) -> None:
    browser = Browser(logged, parts=[b"{"], endless=True)
    browser.gone.set()
    await browser.visit("/v1/completions")
    assert lines(file)[0]["status"] == 499


async def test_lines_cannot_be_forged(make_app, file) -> None:
    app = make_app(server={"access_log": str(file)}, telemetry={"log_prompts": True})
    async with connect(app) as http:
        await http.post("/v1/completions", json=TEXT | {"prompt": 'a\n{"status": 200}\r\x85\u2028\u2029'})
        response = await http.get("/healthz", headers={"x-request-id": 'a" \u2028 {"status": 200}'.encode()})
    assert "status" not in response.headers["x-request-id"]
    assert len(file.read_text().splitlines()) == 2


async def test_it_appends_and_follows_a_rotation(make_app, file) -> None:
    file.write_text("{}\n")
    async with connect(make_app(server={"access_log": str(file)})) as http:
        await http.get("/healthz")
        assert len(lines(file)) == 2
        file.rename(file.with_suffix(".1"))
        await http.get("/healthz")
    assert len(lines(file)) == 1


def test_a_file_that_cannot_be_written_stops_the_start(make_app, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.access_log: cannot write .*Is a directory"):
        make_app(server={"access_log": str(tmp_path)})


async def test_without_a_file_nothing_is_written(http, capfd) -> None:
    await http.post("/v1/completions", json=TEXT)
    assert "".join(capfd.readouterr()) == ""
