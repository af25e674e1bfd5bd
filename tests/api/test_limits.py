"""Tenants' limits: what is let in, what is told to the others, and that no slot is ever lost."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.asgi import Browser, connect

from gammaray.api.limits import MINUTE_S, Limiter
from gammaray.config import Limits
from gammaray.errors import EngineFailure, RateLimited

pytestmark = pytest.mark.anyio
TEXT = {"model": "tiny", "prompt": "hi"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ask(limiter: Limiter) -> RateLimited | None:
    """One request that ends at once."""
    try:
        with limiter.slot():
            return None
    except RateLimited as error:
        return error


@given(st.integers(1, 5), st.lists(st.integers(0, 40), max_size=40))
def test_never_more_than_the_limit_in_any_minute(most: int, pauses: list[int]) -> None:
    clock = Clock()
    limiter, let_in = Limiter(Limits(requests_per_minute=most), clock), []
    for pause in pauses:
        clock.now += pause
        recent = [start for start in let_in if clock.now - start < MINUTE_S]
        refused = ask(limiter)
        assert (refused is None) == (len(recent) < most)
        if refused is None:
            let_in.append(clock.now)
        else:
            assert (refused.status, refused.code) == (429, "requests_per_minute")
            assert refused.retry_after == recent[0] + MINUTE_S - clock.now


@given(st.integers(1, 3), st.lists(st.integers(0, 30), min_size=4, max_size=20))
def test_retry_after_is_exact(most: int, pauses: list[int]) -> None:
    """A second before it is too early; then it is not."""
    clock = Clock()
    limiter = Limiter(Limits(requests_per_minute=most), clock)
    for pause in pauses:
        clock.now += pause
        refused = ask(limiter)
        if refused is not None:
            clock.now += refused.retry_after - 1
            assert ask(limiter) is not None
            clock.now += 1
            assert ask(limiter) is None


class Slots(RuleBasedStateMachine):
    """Requests that come and go in any order; the limiter counts what is open."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.limiter = Limiter(Limits(requests_per_minute=6, max_concurrent=3), self.clock)
        self.open: list[ExitStack] = []
        self.starts: list[float] = []

    @rule(seconds=st.integers(0, 30))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule()
    def enter(self) -> None:
        recent = [start for start in self.starts if self.clock.now - start < MINUTE_S]
        stack = ExitStack()
        try:
            stack.enter_context(self.limiter.slot())
        except RateLimited as error:
            assert error.code == ("max_concurrent" if len(self.open) == 3 else "requests_per_minute")
            assert len(self.open) == 3 or len(recent) == 6
        else:
            assert len(self.open) < 3 and len(recent) < 6
            self.open.append(stack)
            self.starts.append(self.clock.now)

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        failure=st.sampled_from([None, ValueError(), asyncio.CancelledError(), GeneratorExit()]),
    )
    def leave(self, data: st.DataObject, failure: BaseException | None) -> None:
        stack = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        stack.__exit__(type(failure) if failure else None, failure, None)

    @invariant()
    def counts(self) -> None:
        assert self.limiter.open == len(self.open)


TestSlots = Slots.TestCase


def limited(make_app, clock=None, **limits: int):
    tenants = {"default": {"drafter": "lookup", "limits": limits}}
    return make_app(clock or Clock(), tenants=tenants)


def code(response: httpx.Response) -> tuple[int, str, str | None]:
    return response.status_code, response.json()["error"]["code"], response.headers.get("retry-after")


async def test_requests_per_minute(make_app, engine) -> None:
    clock = Clock()
    async with connect(limited(make_app, clock, requests_per_minute=2)) as http:
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 200
        clock.now += 10.5
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        for _ in range(3):
            response = await http.post("/v1/completions", json=TEXT)
            assert code(response) == (429, "requests_per_minute", "50")
            assert response.json()["error"]["type"] == "rate_limit_error"
        assert (await http.get("/v1/models")).status_code == 200
        clock.now += 50
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 200
        assert code(await http.post("/v1/completions", json=TEXT)) == (429, "requests_per_minute", "10")
    assert len(engine.requests) == 3


async def test_tenants_do_not_share_limits(make_app) -> None:
    from gammaray.api.auth import fingerprint

    tenants = {
        name: {
            "api_keys": [{"name": "k", "sha256": fingerprint(f"gr-{name}".encode())}],
            "limits": {"requests_per_minute": 1},
        }
        for name in ("a", "b")
    }
    app = make_app(tenants=tenants)
    for name in ("a", "b"):
        async with connect(app, f"gr-{name}") as http:
            assert (await http.post("/v1/completions", json=TEXT)).status_code == 200
            assert (await http.post("/v1/completions", json=TEXT)).status_code == 429


async def started(engine, number: int) -> None:
    while len(engine.requests) < number:
        await asyncio.sleep(0)


async def test_max_concurrent(make_app, engine) -> None:
    app = limited(make_app, max_concurrent=2)
    engine.stop_at = 1
    async with connect(app) as http:
        visits = [
            asyncio.create_task(http.post("/v1/completions", json=TEXT | {"stream": stream}))
            for stream in (False, True)
        ]
        await started(engine, 2)
        assert code(await http.post("/v1/completions", json=TEXT)) == (429, "max_concurrent", "1")
        engine.go.set()
        assert [(await visit).status_code for visit in visits] == [200, 200]
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@pytest.mark.parametrize(
    "way", ["finish", "error", "bug", "early error", "wrong", "leave", "cancel", "timeout"]
)
async def test_every_way_out_frees_the_slot(make_app, engine, way, stream, spec_version) -> None:
    app = limited(make_app, max_concurrent=1)
    body: dict[str, object] = TEXT | {"stream": stream}
    if way in ("error", "bug"):
        engine.fail_at = {1: EngineFailure("bad step") if way == "error" else RuntimeError("bug")}
    elif way == "early error":
        engine.fail_at = {0: EngineFailure("bad step")}
    elif way == "wrong":
        body["temperature"] = 9
    elif way == "timeout":
        body["timeout"] = 0.02
    if way in ("leave", "cancel", "timeout"):
        engine.stop_at = 1
    browser = Browser(app, body, 1 if way == "leave" and stream else None, spec_version)
    visit = asyncio.create_task(browser.visit("/v1/completions"))
    if way in ("leave", "cancel"):
        await started(engine, 1)
        browser.gone.set() if way == "leave" else visit.cancel()
    await asyncio.wait([visit])
    engine.stop_at, engine.fail_at = None, {}
    async with connect(app) as http:
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 200
    assert len(engine.aborted) == (0 if way in ("finish", "wrong") else 1)


@pytest.mark.parametrize(
    ("asked", "limit", "given", "noted"),
    [
        ({}, 10, 10, True),
        ({}, 100, 16, False),
        ({"max_tokens": 7}, 10, 7, False),
        ({"max_tokens": 10}, 10, 10, False),
    ],
)
async def test_max_tokens_of_completions(make_app, engine, asked, limit, given, noted) -> None:
    async with connect(limited(make_app, max_tokens=limit)) as http:
        answer = (await http.post("/v1/completions", json=TEXT | asked)).json()
    assert engine.requests[0].sampling.max_tokens == given
    notes = answer["metrics"]["speculative_decoding"]["notes"]
    assert notes == (["max_tokens was set to 10, the limit of this tenant"] if noted else [])


async def test_max_tokens_of_chats(make_app, engine) -> None:
    async with connect(limited(make_app, max_tokens=10)) as http:
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert engine.requests[0].sampling.max_tokens == 10
        for field in ("max_tokens", "max_completion_tokens"):
            response = await http.post("/v1/chat/completions", json=CHAT | {field: 11})
            assert code(response)[:2] == (400, "max_tokens")
            assert response.json()["error"]["param"] == field
            assert "11 exceeds 10" in response.json()["error"]["message"]
    assert len(engine.requests) == 1


async def test_a_stream_holds_its_slot_to_the_end(make_app, engine) -> None:
    app = limited(make_app, max_concurrent=1)
    engine.stop_at = 2
    browser = Browser(app, TEXT | {"stream": True})
    visit = asyncio.create_task(browser.visit("/v1/completions"))
    while b"lo " not in browser.content:
        await asyncio.sleep(0)
    second = Browser(app, TEXT)
    await second.visit("/v1/completions")
    assert (second.status, json.loads(second.content)["error"]["code"]) == (429, "max_concurrent")
    engine.go.set()
    await visit
    assert browser.content.endswith(b"data: [DONE]\n\n")
