"""API keys: who gets in, where to, and what is never said."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.asgi import connect

from gammaray.api.auth import PREFIX, Identity, Keyring, access, fingerprint, fresh_key
from gammaray.config import parse
from gammaray.errors import Forbidden, GammarayError, Unauthorized

pytestmark = pytest.mark.anyio
WEB, APP, OPS = "gr-web", "gr-app", "gr-ops"
TEXT = {"model": "tiny", "prompt": "hi"}
HEALTH = "/gammaray/v1/health"


def key(secret: str, name: str) -> dict[str, str]:
    return {"name": name, "sha256": fingerprint(secret.encode())}


KEYED = {
    "default": {"drafter": "lookup", "speculation": {"gamma": 4}},
    "chat": {"api_keys": [key("gr-old", "old"), key(WEB, "web")], "drafter": "other"},
    "code": {"api_keys": [key(APP, "app")]},
}
SERVER = {"operator_keys": [key(OPS, "ops")]}


@pytest.fixture
def closed(make_app):
    return make_app(tenants=KEYED, server=SERVER | {"require_api_key": True})


@pytest.fixture
def half_open(make_app):
    return make_app(tenants=KEYED, server=SERVER)


def error(response: httpx.Response) -> tuple[int, str]:
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize(
    ("secret", "tenant", "drafter"),
    [(WEB, "chat", "other"), (APP, "code", None), ("gr-old", "chat", "other")],
)
async def test_a_key_decides_the_tenant_and_its_policy(closed, engine, secret, tenant, drafter) -> None:
    async with connect(closed, secret) as http:
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 200
        assert (await http.get("/v1/models")).status_code == 200
    assert (engine.requests[0].tenant, engine.requests[0].plan.drafter) == (tenant, drafter)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/nothing"])
async def test_without_a_key_a_closed_server_answers_nothing(closed, engine, path) -> None:
    async with connect(closed) as http:
        response = await http.post(path, content=b"{not even JSON")
        assert error(response) == (401, "missing_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "authentication_error"
    assert engine.requests == []


async def test_a_key_is_asked_for_before_the_body_is_read(closed) -> None:
    async def body():
        raise AssertionError("was read")
        yield b""

    async with connect(closed) as http:
        assert (await http.post("/v1/completions", content=body())).status_code == 401


async def test_an_unknown_key_is_refused_even_where_none_is_needed(half_open, engine) -> None:
    async with connect(half_open, "gr-nobody") as http:
        response = await http.post("/v1/completions", json=TEXT)
    assert error(response) == (401, "invalid_api_key")
    assert "gr-nobody" not in response.text
    async with connect(half_open) as http:
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 200
    assert engine.requests[0].tenant == "default"


@pytest.mark.parametrize("header", ["Basic abc", "gr-web", "Bearer gr-web", "anything at all"])
async def test_without_keys_the_header_means_nothing(http: httpx.AsyncClient, engine, header) -> None:
    response = await http.post("/v1/completions", json=TEXT, headers={"authorization": header})
    assert (response.status_code, engine.requests[0].tenant) == (200, "default")


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Basic gr-web")],
        [(b"authorization", b"gr-web")],
        [(b"authorization", b"Bearer gr-web x")],
        [(b"authorization", b"Bearer  gr-web")],
        [(b"authorization", b"Bearer gr-web"), (b"authorization", b"Bearer gr-web")],
        [(b"authorization", "Bearer gr-wéb".encode())],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"x-api-key", b"gr-web")],
    ],
)
async def test_malformed_headers(closed, headers: Sequence[tuple[bytes, bytes]]) -> None:
    async with connect(closed) as http:
        assert (await http.get("/v1/models", headers=list(headers))).status_code == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_the_scheme_has_no_case_and_the_key_has(closed, scheme) -> None:
    async with connect(closed) as http:
        ask = lambda secret: http.get("/v1/models", headers={"authorization": f"{scheme} {secret}"})  # noqa: E731
        assert (await ask(WEB)).status_code == 200
        assert (await ask(WEB.upper())).status_code == 401


async def test_probes_are_open(closed) -> None:
    async with connect(closed) as http:
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/readyz")).status_code == 200


OPERATED = [HEALTH, "/gammaray/v1", "/gammaray/v1/", "/gammaray/v1/nothing", f"{HEALTH}/"]


@pytest.mark.parametrize("path", OPERATED)
@pytest.mark.parametrize(
    ("secret", "status"),
    [(None, (401, "missing_api_key")), ("x", (401, "invalid_api_key")), (WEB, (403, "wrong_key"))],
)
async def test_operator_routes_look_the_same_to_strangers(half_open, path, secret, status) -> None:
    async with connect(half_open, secret) as http:
        assert error(await http.get(path)) == status
        assert error(await http.delete(path)) == status


async def test_the_operator(half_open, engine) -> None:
    async with connect(half_open, OPS) as http:
        health = (await http.get(HEALTH)).json()
        assert (health["status"], health["model"]["name"], health["model"]["max_model_len"]) == (
            "ok",
            "tiny",
            64,
        )
        assert error(await http.get("/gammaray/v1/nothing")) == (404, "unknown_url")
        assert error(await http.get(f"{HEALTH}/")) == (404, "unknown_url")
        assert error(await http.post(HEALTH)) == (405, "method_not_allowed")
        assert error(await http.get("/v1/models")) == (403, "wrong_key")
        assert health["engine"]["kv_used_blocks"] == 3
        engine.info_error = GammarayError("the engine is stuck")
        stuck = {"status": "unavailable", "model": None, "reason": "the engine is stuck"}
        assert (await http.get(HEALTH)).json() == health | stuck


@pytest.mark.parametrize("secret", [None, WEB, "x"])
async def test_without_operator_keys_the_way_there_is_told(make_app, secret) -> None:
    async with connect(make_app(tenants=KEYED), secret) as http:
        response = await http.get(HEALTH)
        assert error(response) == (403, "no_operator_keys")
        assert "server.operator_keys" in response.json()["error"]["message"]


async def test_the_openapi_document_does_not_list_operator_routes(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert "/v1/completions" in paths
    assert not [path for path in paths if path.startswith("/gammaray")]


@pytest.mark.parametrize(
    ("path", "protect", "wanted"),
    [
        ("/metrics", False, "open"),
        ("/metrics", True, "operator"),
        ("/dashboard/events", False, "open"),
        ("/dashboard/events", True, "operator"),
        ("/dashboard/events/", True, "operator"),
        ("/dashboard", True, "open"),
        ("/dashboard/page.js", True, "open"),
        ("/metricsx", True, "open"),
        ("/gammaray/v10", False, "open"),
        ("/v1", False, "open"),
        ("/v1/", False, "tenant"),
        ("/", True, "open"),
    ],
)
def test_access(path: str, protect: bool, wanted: str) -> None:
    assert access(path, protect) == wanted


async def test_protected_metrics(make_app) -> None:
    app = make_app(server=SERVER | {"protect_metrics": True})
    async with connect(app) as http:
        assert error(await http.get("/metrics")) == (401, "missing_api_key")
    async with connect(app, OPS) as http:
        assert error(await http.get("/metrics")) == (404, "unknown_url")


@pytest.mark.parametrize(
    ("root", "prefix"), [("/llm", "/llm"), ("/", ""), ("/llm", ""), ("/gammaray", ""), ("/v1", ""), ("", "")]
)
async def test_a_prefix_of_a_proxy_opens_no_route(closed, root: str, prefix: str) -> None:
    async def behind_a_proxy(scope, receive, send):
        await closed({**scope, "root_path": root, "path": prefix + scope["path"]}, receive, send)

    for path in (HEALTH, "/v1/models", "/v1/completions"):
        async with connect(behind_a_proxy) as http:
            assert (await http.get(path)).status_code in (401, 404)
        async with connect(behind_a_proxy, WEB) as http:
            reached = (await http.get("/v1/models")).status_code
            assert reached == (404 if root == "/v1" else 200)


@given(st.sampled_from(["/v1/models", HEALTH]), st.lists(st.binary(max_size=60), max_size=3), st.booleans())
def test_no_header_gets_in_but_a_key(path: str, headers: list[bytes], required: bool) -> None:
    server = SERVER | {"require_api_key": required}
    ring = Keyring(
        parse({"target": {"model": "x"}, "tenants": {"chat": KEYED["code"]}, "server": server}, "t")
    )
    if path == "/v1/models" and not headers and not required:
        assert ring.admit(path, headers) == Identity("default")
    else:
        with pytest.raises((Unauthorized, Forbidden)):
            ring.admit(path, headers)


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time tells nothing about which key it was, or how much of it was right."""
    import hmac

    compared: list[tuple[str, str]] = []

    def compare(a: str, b: str) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    ring = Keyring(
        parse({"target": {"model": "x"}, "tenants": KEYED, "drafters": DRAFTERS, "server": SERVER}, "t")
    )
    assert ring.admit("/v1/models", [b"Bearer gr-old"]) == Identity("chat", "old")
    assert len(compared) == 4
    assert ring.admit(HEALTH, [b"Bearer gr-ops"]) == Identity(None, "ops")
    assert len(compared) == 8


DRAFTERS = {"lookup": {"method": "ngram"}, "other": {"method": "ngram"}}


async def test_no_key_or_hash_is_logged_or_answered(make_app, engine, tmp_path, caplog, capfd) -> None:
    file = tmp_path / "access.jsonl"
    app = make_app(tenants=KEYED, server=SERVER | {"access_log": str(file)}, telemetry={"log_prompts": True})
    engine.fail_at = {1: RuntimeError("boom")}
    said = ""
    with caplog.at_level(logging.DEBUG):
        for secret in (WEB, OPS, "gr-nobody", "gr-web gr-app"):
            async with connect(app, secret) as http:
                for response in (
                    await http.post("/v1/completions", json=TEXT),
                    await http.post("/v1/completions", json=TEXT | {"stream": True}),
                    await http.get(HEALTH),
                ):
                    said += response.text + str(response.headers)
    said += file.read_text() + caplog.text + "".join(capfd.readouterr())
    hashes = [fingerprint(secret.encode()) for secret in (WEB, OPS, "gr-nobody")]
    assert not [secret for secret in (WEB, APP, OPS, "gr-nobody", "gr-old", *hashes) if secret in said]
    assert {json.loads(line)["key"] for line in file.read_text().splitlines()} == {"web", "ops", None}


def test_fresh_keys() -> None:
    keys = {fresh_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(PREFIX) and len(key) == len(PREFIX) + 43 and key.isascii() for key in keys)
