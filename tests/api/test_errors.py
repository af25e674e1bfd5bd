"""What a client is told when something is wrong: always one shape, never too much of its own text."""

from __future__ import annotations

import logging

import httpx
import pytest
from fastapi import Response
from hypothesis import given
from hypothesis import strategies as st
from support.asgi import Browser

from gammaray import errors as tree
from gammaray.api import errors

pytestmark = pytest.mark.anyio
TEXT = {"model": "tiny", "prompt": "hi"}
LONG = "x" * 5000


def error(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    fault = response.json()["error"]
    assert set(fault) == {"message", "type", "param", "code"}
    assert all(fault[key] for key in ("message", "type", "code"))
    return fault


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/v1/completions/", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/completions", 405, "method_not_allowed"),
        ("BREW", "/v1/completions", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
async def test_routes(http: httpx.AsyncClient, method, path, status, code) -> None:
    assert error(await http.request(method, path), status)["code"] == code


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (TEXT | {LONG: 1}, LONG[:97] + "..."),
        (TEXT | {"model": LONG[:1000]}, "model"),
        (TEXT | {"model": LONG}, "model"),
        (TEXT | {"temperature": LONG}, "temperature"),
        (TEXT | {"stop": [LONG]}, "stop"),
        (TEXT | {"speculation": {"drafter": LONG[:1000]}}, "speculation.drafter"),
        (TEXT | {"speculation": {LONG: 1}}, f"speculation.{LONG}"[:97] + "..."),
        (TEXT | {"logit_bias": {LONG: 1}}, "logit_bias"),
    ],
)
async def test_a_client_reads_little_of_what_it_sent(http: httpx.AsyncClient, body, param) -> None:
    response = await http.post("/v1/completions", json=body)
    assert response.json()["error"]["param"] == param
    assert len(response.content) < 800


@pytest.mark.parametrize("path", [f"/v1/models/{LONG}", f"/v1/{LONG}"])
async def test_nor_of_the_path(http: httpx.AsyncClient, path) -> None:
    response = await http.get(path)
    error(response, 404)
    assert len(response.content) < 800


async def test_an_unknown_drafter_has_a_code(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json=TEXT | {"speculation": {"drafter": "nope"}})
    fault = error(response, 400)
    assert (fault["code"], fault["param"]) == ("drafter_not_found", "speculation.drafter")


async def test_a_strange_host_is_no_failure(http: httpx.AsyncClient) -> None:
    error(await http.get("/nowhere", headers={"host": "[::1"}), 404)


TREE = [
    tree.InvalidRequest("x"),
    tree.TooLarge("x"),
    tree.Unprocessable("x"),
    tree.Unauthorized("x"),
    tree.Forbidden("x"),
    tree.NotFound("x"),
    tree.TimedOut("x"),
    tree.Overloaded("x"),
    tree.RateLimited("x", retry_after=0.2),
    tree.ReplicaLost("x", retry_after=2.01),
    tree.EngineFailure("x"),
    tree.ConfigError("x"),
]


@pytest.mark.parametrize("failure", TREE, ids=lambda failure: type(failure).__name__)
async def test_every_error_has_a_status_a_code_and_its_headers(
    http: httpx.AsyncClient, engine, failure
) -> None:
    engine.fail_at = {0: failure}
    response = await http.post("/v1/completions", json=TEXT)
    error(response, failure.status)
    waits = {tree.Overloaded: "1", tree.RateLimited: "1", tree.ReplicaLost: "3"}
    assert response.headers.get("retry-after") == waits.get(type(failure))
    assert response.headers.get("www-authenticate") == ("Bearer" if failure.status == 401 else None)


@given(st.text(max_size=3000), st.none() | st.text(max_size=3000), st.none() | st.text(max_size=20))
def test_any_text_can_be_said(message: str, param: str | None, code: str | None) -> None:
    said = Response(status_code=200)
    said = errors.response(tree.InvalidRequest(message, param=param, code=code), {})
    assert len(said.body) < 20_000
    said.body.decode()


def test_what_is_hidden_says_where_but_not_what(caplog: pytest.LogCaptureFixture) -> None:
    def tokenize(prompt: str) -> None:
        raise ValueError(f"cannot read {prompt}")

    with caplog.at_level(logging.DEBUG):
        try:
            tokenize("a secret")
        except ValueError as failure:
            shown = errors.hide(failure)
    assert "secret" not in caplog.text + shown.message
    assert "ValueError" in caplog.text
    assert "test_errors.py" in caplog.text and "tokenize" in caplog.text


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("abc-1.2_X", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("", False),
        ("a b", False),
        ("a,b", False),
        ("ä", False),
        ('x"}', False),
    ],
)
async def test_request_ids(http: httpx.AsyncClient, sent: str, kept: bool) -> None:
    for path in ("/healthz", "/v1/nothing"):
        response = await http.get(path, headers=[(b"x-request-id", sent.encode("latin-1"))])
        (got,) = response.headers.get_list("x-request-id")
        assert (got == sent) == kept
        assert errors_id(got)


def errors_id(name: str) -> bool:
    return 0 < len(name) <= 128 and name.replace("-", "").replace(".", "").replace("_", "").isalnum()


async def test_request_ids_differ(http: httpx.AsyncClient) -> None:
    ids = [(await http.get("/healthz")).headers["x-request-id"] for _ in range(20)]
    assert len(set(ids)) == 20
    twice = [(b"x-request-id", b"a"), (b"x-request-id", b"b")]
    assert (await http.get("/healthz", headers=twice)).headers["x-request-id"] not in ("a", "b", "a, b")


async def test_a_stream_has_an_id_and_a_failed_one_too(app, engine) -> None:
    for fails in ({}, {0: RuntimeError("x")}, {1: RuntimeError("x")}):
        engine.fail_at = fails
        browser = Browser(app, TEXT | {"stream": True}, headers={"x-request-id": "mine"})
        await browser.visit("/v1/completions")
        assert (b"x-request-id", b"mine") in browser.sent[0]["headers"]
