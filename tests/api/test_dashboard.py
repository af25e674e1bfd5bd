"""The live page's routes: open files, and a stream of overviews that ends as a stream should."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from support import overview, sse
from support.asgi import Browser, connect
from support.page import OPERATOR_KEY, Source, page_app

from gammaray.api import dashboard
from gammaray.api.dashboard import LIMIT, Feed
from gammaray.api.drain import Drain
from gammaray.errors import EngineFailure, GammarayError, Overloaded
from gammaray.telemetry import live

pytestmark = pytest.mark.anyio
EVENTS = "/dashboard/events"
SHORT_S = 0.35  # a stream with a few events


class Counting(Source):
    """Notes each question; `fail` is raised from the `fail_at`-th on, and `hangs` lets it wait for ever."""

    def __init__(self, fail: Exception | None = None, fail_at: int = 0, hangs: bool = False) -> None:
        super().__init__(overview.busy())
        self.asked: list[int] = []
        self.fail, self.fail_at, self.hangs = fail, fail_at, hangs

    async def overview(self, limit: int) -> dict[str, Any]:
        self.asked.append(limit)
        if self.hangs:
            await asyncio.Event().wait()
        if self.fail and len(self.asked) > self.fail_at:
            raise self.fail
        return await super().overview(limit) | {"version": len(self.asked)}


@pytest.fixture
def source() -> Counting:
    return Counting()


@pytest.fixture
def drain() -> Drain:
    return Drain()


@pytest.fixture
async def http(source: Counting, drain: Drain) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(page_app(source, drain, stream_s=SHORT_S)) as http:
        yield http


async def test_the_shell_and_its_files_are_served(http: httpx.AsyncClient, source) -> None:
    shell = await http.get("/dashboard")
    assert shell.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:href|src)="dashboard/([^"]+)"', shell.text)
    assert {"page.js", "page.css", "icon.svg"} <= set(named)
    for name in live.assets():
        answer = await http.get(f"/dashboard/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == live.TYPES[name.rpartition(".")[2]]
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert source.asked == []


@pytest.mark.parametrize("name", ["nothing.js", "..%2flive.py", "%2e%2e", "page.js%00", "page.js/", ""])
async def test_nothing_else_is_a_file_of_the_page(http: httpx.AsyncClient, name: str) -> None:
    answer = await http.get(f"/dashboard/{name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


def test_the_page_keeps_its_own_rules() -> None:
    """No inline code, no markup made of data, nothing from another server."""
    text = {name: asset.content.decode() for name, asset in live.assets().items()}
    for content in text.values():
        content = content.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.|@import|innerHTML|outerHTML|insertAdjacent|eval\(", content)
        assert not re.search(r"document\.write|localStorage|sessionStorage|cookie", content)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script[^>]*>[^<]", text["index.html"])


async def test_events_are_the_overview_again_and_again(http: httpx.AsyncClient, source) -> None:
    answer = await http.get(EVENTS)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    found = [json.loads(one) for one in sse.data(answer.content)]
    assert [one["version"] for one in found] == list(range(1, len(found) + 1))
    assert len(found) >= 2
    assert found[0]["limit"] == LIMIT and found[0]["tenants"] == source.data["tenants"]
    assert set(source.asked) == {LIMIT}


async def test_many_streams_ask_once(source, drain) -> None:
    feed = Feed(source, drain, interval_s=60)
    streams = [feed.events(until=float("inf")) for _ in range(5)]
    firsts = await asyncio.gather(*(anext(stream) for stream in streams))
    assert len(source.asked) == 1
    assert len(set(firsts)) == 1
    for stream in streams:
        await stream.aclose()
    assert feed.open == 0


async def test_streams_are_bounded(source, drain, monkeypatch) -> None:
    monkeypatch.setattr(dashboard, "STREAMS", 2)
    app = page_app(source, drain)
    staying = [Browser(as_get(app), parts=[b""]) for _ in range(2)]
    visits = [asyncio.create_task(one.visit(EVENTS)) for one in staying]
    while not all(len(one.sent) > 1 for one in staying):
        await asyncio.sleep(0)
    async with connect(app) as http:
        refused = await http.get(EVENTS)
    assert refused.status_code == 503
    assert "2 live pages are open" in refused.json()["error"]["message"]
    for one in staying:
        one.gone.set()
    await asyncio.gather(*visits)


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@pytest.mark.parametrize("leave_after", [0, 1, 2])
async def test_who_leaves_makes_room(source, drain, monkeypatch, spec_version, leave_after) -> None:
    monkeypatch.setattr(dashboard, "STREAMS", 1)
    app = page_app(source, drain, stream_s=SHORT_S)
    for _ in range(3):
        browser = Browser(as_get(app), leave_after=leave_after, spec_version=spec_version, parts=[b""])
        await browser.visit(EVENTS)
        assert browser.status == 200
    async with connect(app) as http:
        assert (await http.get(EVENTS)).status_code == 200


async def test_a_drain_ends_streams_with_a_reason(source, drain) -> None:
    app = page_app(source, drain)
    browser = Browser(as_get(app), parts=[b""])
    visit = asyncio.create_task(browser.visit(EVENTS))
    while len(browser.sent) < 2:
        await asyncio.sleep(0)
    drain.close()
    async with asyncio.timeout(30):
        await visit
    assert ended(browser)["error"]["code"] == "shutting_down"
    async with connect(app) as http:
        late = await http.get(EVENTS)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
        assert (await http.get("/dashboard")).status_code == 200


async def test_a_cut_does_not_wait_for_the_next_event(source, drain) -> None:
    feed = Feed(source, drain, interval_s=1e6)
    stream = feed.events(until=float("inf"))
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    drain.cut()
    with pytest.raises(Overloaded):
        await asyncio.wait_for(waiting, 30)
    assert feed.open == 0


@pytest.mark.parametrize(
    ("failure", "status"),
    [(Overloaded("no controller"), 503), (EngineFailure("bad"), 500), (RuntimeError("secret"), 500)],
)
async def test_a_failure_at_the_start_is_a_status(drain, failure, status) -> None:
    async with connect(page_app(Counting(failure), drain)) as http:
        answer = await http.get(EVENTS)
    assert answer.status_code == status
    assert "secret" not in answer.text


@pytest.mark.parametrize("failure", [GammarayError("no controller"), RuntimeError("secret")])
async def test_a_failure_later_is_the_last_event(drain, failure) -> None:
    async with connect(page_app(Counting(failure, fail_at=1), drain)) as http:
        answer = await http.get(EVENTS)
    first, last = (json.loads(one) for one in sse.data(answer.content))
    assert "tenants" in first and "error" in last
    assert "secret" not in answer.text


async def test_a_source_that_hangs_is_told(drain, monkeypatch) -> None:
    monkeypatch.setattr(dashboard, "ANSWER_S", 0.01)
    async with connect(page_app(Counting(hangs=True), drain)) as http:
        answer = await http.get(EVENTS)
    assert answer.status_code == 503
    assert "overview" in answer.json()["error"]["message"]


async def test_behind_protection_only_the_data_is_closed(source, drain) -> None:
    app = page_app(source, drain, protect=True, stream_s=SHORT_S)
    async with connect(app) as http:
        assert (await http.get("/dashboard")).status_code == 200
        assert (await http.get("/dashboard/page.js")).status_code == 200
        refused = await http.get(EVENTS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "missing_api_key")
        assert (await http.get(f"{EVENTS}/")).status_code == 401
    assert source.asked == []
    async with connect(app, OPERATOR_KEY) as http:
        assert (await http.get(EVENTS)).status_code == 200


def as_get(app):
    async def get(scope, receive, send):
        await app({**scope, "method": "GET"}, receive, send)

    return get


def ended(browser: Browser) -> dict[str, Any]:
    """The last event of a response that came to its proper end."""
    assert browser.sent[-1]["more_body"] is False
    return json.loads(sse.data(browser.content)[-1])
