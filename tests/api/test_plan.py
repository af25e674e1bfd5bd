"""What a request over HTTP tells the planner, what it gets, and how long it counts as open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from support.asgi import Browser, connect

from gammaray.api.app import create_app
from gammaray.config import Limits
from gammaray.errors import InvalidRequest
from gammaray.types import Asked, Forecast, Planned, SpeculationPlan, Wish

pytestmark = pytest.mark.anyio
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = {"model": "tiny", "prompt": "hi"}
TURNS = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]


class Planner:
    """Says always the same, and notes what is open."""

    def __init__(self) -> None:
        self.planned = Planned(SpeculationPlan("lookup", 3, 2), "code", Forecast((0.5,), 0.7, 2), ("a note",))
        self.asked: list[Asked] = []
        self.open_now = 0

    @contextmanager
    def open(self, asked: Asked) -> Iterator[Planned]:
        if asked.wish.drafter == "x":
            raise InvalidRequest("no such drafter")
        self.asked.append(asked)
        self.open_now += 1
        try:
            yield self.planned
        finally:
            self.open_now -= 1

    def limits(self, tenant: str) -> Limits:
        return Limits(max_tokens=9)


@pytest.fixture
def planner() -> Planner:
    return Planner()


@pytest.fixture
def app(engine, tokenizer, planner: Planner, config):
    return create_app(engine, tokenizer, planner, config)


async def test_a_completion_is_told(http: httpx.AsyncClient, planner: Planner) -> None:
    body = TEXT | {"temperature": 0.5, "seed": 0, "speculation": {"gamma": 2, "drafter": "other"}}
    answer = await http.post(COMPLETION, json=body, headers={"X-Kind": "A"})
    (asked,) = planner.asked
    assert asked.headers["x-kind"] == "A"
    assert asked == Asked(
        answer.json()["id"],
        "default",
        "completions",
        tuple(b"hi"),
        "hi",
        asked.headers,
        0.5,
        True,
        Wish(drafter="other", gamma=2),
    )


async def test_a_chat_is_told(http: httpx.AsyncClient, planner: Planner) -> None:
    answer = await http.post(CHAT, json={"model": "tiny", "messages": TURNS})
    (asked,) = planner.asked
    assert (asked.request_id, asked.route) == (answer.json()["id"], "chat")
    assert asked.text == "Be kind.\n\nhi"
    assert (asked.temperature, asked.seeded, asked.wish) == (1.0, False, Wish())


@pytest.mark.parametrize(
    ("prompt", "ids", "text"),
    [(["a", "abc", "ab"], b"abc", "abc"), ([[97], [97, 98]], b"ab", None), ([1, 2], bytes([1, 2]), None)],
)
async def test_of_several_prompts_the_longest_is_told(
    http: httpx.AsyncClient, planner: Planner, engine, prompt: object, ids: bytes, text: str | None
) -> None:
    await http.post(COMPLETION, json=TEXT | {"prompt": prompt})
    (asked,) = planner.asked
    assert (asked.prompt, asked.text) == (tuple(ids), text)
    told = {request.prompt: request.forecast.alpha for request in engine.requests}
    assert told.pop(asked.prompt) == 0.7
    assert set(told.values()) <= {None}  # nothing was foretold of the others


async def test_the_engine_gets_what_was_planned(http: httpx.AsyncClient, planner: Planner, engine) -> None:
    answer = await http.post(COMPLETION, json=TEXT)
    (request,) = engine.requests
    assert (request.plan, request.request_class) == (planner.planned.plan, "code")
    assert request.forecast == planner.planned.forecast
    notes = ["a note", "max_tokens was set to 9, the limit of this tenant"]
    assert answer.json()["metrics"]["speculative_decoding"]["notes"] == notes


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_open_until_its_answer_was_sent(
    app, planner: Planner, engine, path: str, stream: bool
) -> None:
    engine.stop_at = 2
    asks = {"prompt": "hi"} if path == COMPLETION else {"messages": TURNS}
    browser = Browser(app, {"model": "tiny", "stream": stream, **asks})
    visit = asyncio.create_task(browser.visit(path))
    await _until_started(engine)
    assert planner.open_now == 1
    assert bool(browser.sent) == stream  # the head of a stream is out, and it is open still
    engine.go.set()
    await visit
    assert planner.open_now == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_it(app, planner: Planner, engine, stream: bool) -> None:
    engine.stop_at = 2
    browser = Browser(app, TEXT | {"stream": stream})
    visit = asyncio.create_task(browser.visit(COMPLETION))
    await _until_started(engine)
    assert planner.open_now == 1
    browser.gone.set()
    await visit
    assert planner.open_now == 0
    assert len(engine.aborted) == 1


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_ends_it(
    http: httpx.AsyncClient, planner: Planner, engine, number: int, stream: bool
) -> None:
    engine.fail_at[number] = RuntimeError("a bug")
    await http.post(COMPLETION, json=TEXT | {"stream": stream})
    assert (len(planner.asked), planner.open_now) == (1, 0)


async def test_what_cannot_be_built_is_not_open(http: httpx.AsyncClient, planner: Planner) -> None:
    assert (await http.post(COMPLETION, json=TEXT | {"max_tokens": 10})).status_code == 400
    assert (len(planner.asked), planner.open_now) == (1, 0)
    answer = await http.post(COMPLETION, json=TEXT | {"speculation": {"drafter": "x"}})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no such drafter")


async def test_a_prompt_is_in_no_repr_of_a_plan(app, planner: Planner) -> None:
    async with connect(app) as http:
        await http.post(COMPLETION, json=TEXT | {"prompt": "the secret"})
    (asked,) = planner.asked
    assert "secret" not in repr(asked) and json.dumps(list(b"the secret"))[1:-1] not in repr(asked)


async def _until_started(engine) -> None:
    while not engine.requests:
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
