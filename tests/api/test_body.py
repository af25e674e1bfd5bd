"""Bodies: not larger than allowed, and JSON that every reader understands alike."""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.asgi import Browser, connect

from gammaray.api.body import BodyLimit, parse

pytestmark = pytest.mark.anyio
JSON = {"content-type": "application/json"}
TEXT = {"model": "tiny", "prompt": "hi"}
LIMIT = 1000


@pytest.fixture
def small(make_app):
    return make_app(server={"max_body_bytes": LIMIT})


def padded(size: int) -> bytes:
    """A good request of exactly `size` bytes."""
    content = json.dumps(TEXT).encode()
    return content + b" " * (size - len(content))


async def in_parts(content: bytes):
    """httpx sends such a body in chunks, without Content-Length."""
    for start in range(0, len(content), 100):
        yield content[start : start + 100]


@pytest.mark.parametrize("chunked", [False, True])
async def test_the_limit_is_exact(small, engine, chunked) -> None:
    async with connect(small) as http:
        for size, status in ((LIMIT, 200), (LIMIT + 1, 413)):
            content = in_parts(padded(size)) if chunked else padded(size)
            response = await http.post("/v1/completions", content=content, headers=JSON)
            assert response.status_code == status
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "body_too_large", None)
    assert "1000 bytes" in error["message"]
    assert response.headers["connection"] == "close"
    assert len(engine.requests) == 1


async def test_what_is_too_long_is_not_read(small) -> None:
    browser = Browser(small, parts=[b"x" * 400] * 100)
    await browser.visit("/v1/completions")
    assert (browser.status, browser.asked) == (413, 3)
    announced = Browser(small, parts=[b"x"] * 100, headers={"content-length": "99999999999"})
    await announced.visit("/v1/completions")
    assert (announced.status, announced.asked) == (413, 0)


@pytest.mark.parametrize("path", ["/healthz", "/v1/nothing", "/gammaray/v1/x"])
async def test_every_route_has_the_limit(small, path) -> None:
    async with connect(small) as http:
        response = await http.request("GET", path, content=b"x" * (LIMIT + 1))
    assert response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("length", ["-1", "x", "1e9", "²", ""])
async def test_a_length_that_is_none_is_counted(small, length) -> None:
    browser = Browser(small, parts=[b"x" * 400] * 100, headers={"content-length": length})
    await browser.visit("/v1/completions")
    assert browser.status == 413


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(0, 200))
def test_no_more_than_the_limit_comes_through(sizes: list[int], limit: int) -> None:
    import asyncio

    seen: list[bytes] = []

    async def app(scope, receive, send) -> None:
        while (message := await receive())["type"] == "http.request":
            seen.append(message["body"])
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    browser = Browser(BodyLimit(app, limit), parts=[b"x" * size for size in sizes])
    asyncio.run(browser.visit("/"))
    fits = sum(sizes) <= limit
    assert browser.status == (200 if fits else 413)
    assert len(b"".join(seen)) <= limit
    assert fits == (b"".join(seen) == b"x" * sum(sizes) and browser.status == 200)


async def test_an_answer_that_has_begun_goes_on() -> None:
    """A body that turns out too long behind the answer cannot change it."""

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] == "http.request":
            pass
        await send({"type": "http.response.body", "body": b"done"})

    browser = Browser(BodyLimit(app, 5), parts=[b"xxxx"] * 10)
    await browser.visit("/")
    assert (browser.status, browser.content) == (200, b"done")


BAD = [
    (b"", None),
    (b"{", "EOF"),
    (b"nope", "JSON"),
    (b'{"model": "tiny", "prompt": "x"} x', "trailing"),
    (b'{"model": "tiny", "prompt": "\xff"}', "no UTF-8 text from byte 29 on"),
    (json.dumps(TEXT).encode("utf-16"), "no UTF-8 text from byte 0 on"),
    (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', "JSON"),
    (b'{"model": "tiny", "prompt": "x", "temperature": Infinity}', "JSON"),
    (b'{"model": "tiny", "prompt": "x", "temperature": -Infinity}', "JSON"),
    (b'{"model": "tiny", "prompt": "x", "prompt": "y"}', 'duplicate key "prompt"'),
    (b'{"model": "tiny", "prompt": "x", "speculation": {"gamma": 1, "gamma": 2}}', "duplicate"),
    (rb'{"model": "tiny", "prompt": "\ud800"}', "hex escape"),
    (rb'{"model": "tiny", "prompt": "x", "\ud800": 1}', "hex escape"),
    (b'{"a":' * 5000, "recursion limit"),
    (b"[" * 300 + b"]" * 300, "recursion limit"),
    (b"1" * 5000, "number out of range"),
]


@pytest.mark.parametrize(("content", "says"), BAD, ids=range(len(BAD)))
async def test_what_is_no_json(http: httpx.AsyncClient, engine, content, says) -> None:
    response = await http.post("/v1/completions", content=content, headers=JSON)
    error = response.json()["error"]
    assert response.status_code == 400
    if says:
        assert (error["code"], error["param"]) == ("invalid_json", None)
        assert says in error["message"]
    assert engine.requests == []


async def test_a_long_duplicate_key_comes_back_short(http: httpx.AsyncClient) -> None:
    content = b'{"%b": 1, "%b": 2}' % (b"k" * 100_000, b"k" * 100_000)
    response = await http.post("/v1/completions", content=content, headers=JSON)
    assert response.json()["error"]["code"] == "invalid_json"
    assert len(response.content) < 500


JSONS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(JSONS)
def test_good_json_is_read_as_the_standard_library_reads_it(value: object) -> None:
    try:
        content = json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    assert parse(content) == json.loads(content)


@given(st.binary(max_size=50) | st.text(max_size=50).map(lambda text: text.encode("utf-8", "replace")))
def test_anything_else_is_one_error(content: bytes) -> None:
    try:
        value = parse(content)
    except json.JSONDecodeError as error:
        assert error.msg
    else:
        assert value == json.loads(content)
