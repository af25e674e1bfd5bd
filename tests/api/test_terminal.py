"""The terminal chat against the real application, with lines typed by a list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from gammaray.api.auth import fingerprint
from gammaray.api.terminal import talk
from gammaray.errors import EngineFailure, GammarayError


class InProcess(httpx.BaseTransport):
    """Runs each request through the application on an event loop of its own."""

    def __init__(self, app) -> None:
        self.app = app

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return asyncio.run(self._ask(request))

    async def _ask(self, request: httpx.Request) -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://test"
        ) as client:
            answer = await client.request(
                request.method,
                request.url.path,
                content=request.read(),
                headers=request.headers,
            )
        return httpx.Response(answer.status_code, content=answer.content)


@pytest.fixture
def say(app) -> Callable[..., str]:
    def conversation(*lines: str) -> str:
        shown: list[str] = []
        typed = iter(lines)

        def read(_: str) -> str:
            line = next(typed, None)
            if line is None:
                raise EOFError
            return line

        talk("http://test", None, read, shown.append, InProcess(app))
        return "".join(shown)

    return conversation


def asked(engine, number: int) -> bytes:
    return bytes(engine.requests[number].prompt)


def test_answers_and_numbers(say, engine) -> None:
    shown = say("hi", "", "more", "/exit")
    assert shown.count("Hello wörld") == 2
    assert "[6 tokens, " in shown and "tok/s, tau 2.00]" in shown
    assert asked(engine, 1) == "uhi|aHello wörld|umore".encode()


def test_reset_forgets(say, engine) -> None:
    say("hi", "/reset", "again")
    assert asked(engine, 1) == b"uagain"


def test_refused_question_is_dropped(say, engine) -> None:
    shown = say("x" * 80, "short")
    assert "context is 64 tokens" in shown
    assert asked(engine, 0) == b"ushort"


def test_failure_in_an_answer_keeps_what_came(say, engine) -> None:
    engine.fail_at = {2: EngineFailure("bad step")}
    shown = say("hi", "more")
    assert "[bad step]" in shown
    assert asked(engine, 1) == b"uhi|aHello |umore"


def test_ctrl_c_stops_an_answer(app, engine) -> None:
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        if text == "lo ":
            raise KeyboardInterrupt

    lines = iter(["hi", "/exit"])
    talk("http://test", None, lambda _: next(lines), show, InProcess(app))
    assert "[stopped]" in "".join(shown)


def test_a_key_is_sent_and_a_wrong_one_explained(make_app, engine) -> None:
    tenants = {"chat": {"api_keys": [{"name": "web", "sha256": fingerprint(b"gr-web")}]}}
    app = make_app(tenants=tenants, server={"require_api_key": True})
    lines = iter(["hi", "/exit"])
    talk("http://test", "gr-web", lambda _: next(lines), lambda _: None, InProcess(app))
    assert engine.requests[0].tenant == "chat"
    for key, says in (("gr-wrong", "nobody has this API key"), (None, "an API key is needed")):
        with pytest.raises(GammarayError, match=f"{says}.*GAMMARAY_API_KEY") as fault:
            talk("http://test", key, transport=InProcess(app))
        assert "gr-wrong" not in str(fault.value)


def test_no_server() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(GammarayError, match="gammaray serve"):
        talk("http://nowhere", transport=httpx.MockTransport(refuse))
    with pytest.raises(GammarayError, match="no model server"):
        talk("http://web", transport=httpx.MockTransport(lambda _: httpx.Response(200, html="<p>")))
