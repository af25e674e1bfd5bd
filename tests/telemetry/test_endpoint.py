"""The HTTP address that Prometheus asks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import httpx
import pytest

from gammaray.errors import ConfigError
from gammaray.telemetry.endpoint import Endpoint, listening_host


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    opened = Endpoint("127.0.0.1", 0, lambda: b"a_total 1\n")
    yield opened
    opened.close()


def get(endpoint: Endpoint, path: str = "/metrics", **headers: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{endpoint.port}{path}", headers=headers, trust_env=False)


def test_it_gives_the_text(endpoint: Endpoint) -> None:
    answer = get(endpoint)
    assert answer.status_code == 200 and answer.text == "a_total 1\n"
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_nothing_else_is_there(endpoint: Endpoint) -> None:
    assert get(endpoint, "/").status_code == 404
    assert httpx.post(f"http://127.0.0.1:{endpoint.port}/metrics", trust_env=False).status_code == 501


def test_a_protected_one_wants_a_key() -> None:
    opened = Endpoint("127.0.0.1", 0, lambda: b"x", [hashlib.sha256(b"gr-1").hexdigest()])
    try:
        assert get(opened).status_code == 401
        assert get(opened, authorization="Bearer gr-2").status_code == 401
        assert get(opened, authorization="Bearer gr-1").status_code == 200
    finally:
        opened.close()


def test_a_port_that_is_taken_is_a_clear_error(endpoint: Endpoint) -> None:
    with pytest.raises(ConfigError, match="choose another telemetry"):
        Endpoint("127.0.0.1", endpoint.port, lambda: b"")


@pytest.mark.parametrize(
    ("http", "metrics"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "127.0.0.1"), ("127.0.0.9", "127.0.0.1")]
    + [(open_to, open_to) for open_to in ("0.0.0.0", "10.1.2.3", "::", "node-7")],
)
def test_it_is_no_more_open_than_the_server(http: str, metrics: str) -> None:
    assert listening_host(http) == metrics
