"""Every bad request gets a 4xx in OpenAI's shape that names the field, and reaches no engine."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

pytestmark = pytest.mark.anyio
TEXT = {"model": "tiny", "prompt": "hi"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def error(response: httpx.Response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.json()["error"]


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"temprature": 1}, "temprature", "'temperature'"),
        ({"best_of": 2}, "best_of", "use 1"),
        ({"suffix": "x"}, "suffix", "not supported yet"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "not supported yet"),
        ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"temperature": -1}, "temperature", "(got -1)"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"temperature": True}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": -2}, "top_k", "-1"),
        ({"min_p": 1.5}, "min_p", "1"),
        ({"n": 0}, "n", "1"),
        ({"n": 17}, "n", "16"),
        ({"n": 1.5}, "n", "integer"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"seed": 2**64}, "seed", "18446744073709551615"),
        ({"seed": "x"}, "seed", "integer"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "1 to 256 characters"),
        ({"stop": ["a", 1]}, "stop", "texts"),
        ({"stop": {"a": 1}}, "stop", "list"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        (
            {"stream": True, "stream_options": {"includ_usage": 1}},
            "stream_options.includ_usage",
            "'include_usage'",
        ),
        ({"speculation": {"drafter": "nope"}}, "speculation.drafter", "lookup, other"),
        ({"speculation": {"gama": 1}}, "speculation.gama", "'gamma'"),
        ({"speculation": {"gamma": -1}}, "speculation.gamma", "0"),
        ({"prompt": []}, "prompt", "list of texts"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a", 1]}, "prompt", "mix"),
        ({"prompt": [1, True]}, "prompt", "mix"),
        ({"prompt": 5}, "prompt", "text"),
        ({"prompt": ["a"] * 257}, "prompt", "256"),
        ({"prompt": [256]}, "prompt", "vocabulary of 256"),
        ({"prompt": [-1]}, "prompt", "vocabulary"),
        ({"prompt": "\ud800"}, None, "not JSON"),
    ],
)
async def test_completion_fields(http: httpx.AsyncClient, engine, change, param, says) -> None:
    content = json.dumps(TEXT | change)  # httpx refuses to encode a lone surrogate itself
    response = await http.post(
        "/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    fault = error(response)
    assert fault["type"] == "invalid_request_error"
    assert fault["param"] == param
    assert says in fault["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "no tool parser"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", "'user'"),
        ({"messages": [{"role": "user", "content": "x", "nam": 1}]}, "messages[0].nam", "unknown"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            "'image_url' is not supported yet",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content", "'text'"),
        ({"tools": [{"type": "function"}]}, "tools", "no tool parser"),
        ({"tool_choice": "required"}, "tool_choice", "no tool parser"),
        ({"functions": [{"name": "f"}]}, "functions", "no tool parser"),
        ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages", "2048"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "not both"),
        ({"prompt": "x"}, "prompt", "unknown"),
    ],
)
async def test_chat_fields(http: httpx.AsyncClient, engine, change, param, says) -> None:
    fault = error(await http.post("/v1/chat/completions", json=CHAT | change))
    assert fault["param"] == param
    assert says in fault["message"]
    assert engine.requests == []


async def test_neutral_values_of_later_fields_are_taken(http: httpx.AsyncClient) -> None:
    neutral = {"tools": [], "tool_choice": "none", "metadata": {}, "modalities": ["text"], "store": False}
    assert (await http.post("/v1/chat/completions", json=CHAT | neutral)).status_code == 200


async def test_wrong_model(http: httpx.AsyncClient) -> None:
    fault = error(await http.post("/v1/completions", json=TEXT | {"model": "gpt"}), 404)
    assert (fault["code"], fault["param"]) == ("model_not_found", "model")
    assert "'tiny'" in fault["message"]


async def test_missing_field(http: httpx.AsyncClient) -> None:
    fault = error(await http.post("/v1/completions", json={"prompt": "x"}))
    assert (fault["param"], fault["code"]) == ("model", "missing_parameter")


async def test_prompt_longer_than_the_model(http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
    fault = error(await http.post("/v1/completions", json=TEXT | {"prompt": "x" * 64}))
    assert fault["code"] == "context_length_exceeded"
    assert fault["message"].count("64") == 2
    assert (await http.post("/v1/completions", json=TEXT | {"prompt": "x" * 63})).status_code == 200
    with pytest.raises(openai.BadRequestError, match="70 tokens"):
        await client.completions.create(model="tiny", prompt="x" * 70)


async def test_empty_prompt_without_bos(http: httpx.AsyncClient, tokenizer) -> None:
    tokenizer.bos_token_id = None
    fault = error(await http.post("/v1/completions", json=TEXT | {"prompt": ""}))
    assert (fault["code"], fault["param"]) == ("empty_prompt", "prompt")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"nope", b"[1]", b'"x"', b"\xff", b"null", b'{"a":' * 5000, b"1" * 5000]
)
async def test_bodies_that_are_no_object(http: httpx.AsyncClient, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    error(await http.post("/v1/completions", content=content, headers=headers))


async def test_missing_content_type(http: httpx.AsyncClient) -> None:
    fault = error(await http.post("/v1/completions", content=b'{"model": "tiny", "prompt": "x"}'))
    assert "application/json" in fault["message"]


async def test_unknown_field_that_is_no_unicode(http: httpx.AsyncClient) -> None:
    body = rb'{"model": "tiny", "prompt": "x", "\ud800": 1}'
    response = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert error(response)["code"] == "invalid_json"


@pytest.mark.parametrize(
    "change",
    [
        {"k" * 10**6: 1},
        {"model": "m" * 10**6},
        {"stop": ["s" * 10**6]},
        {"prompt": [10**4000]},
        {"logit_bias": {"9" * 10**6: 1}},
        {"logit_bias": {str(10**9): 1}},
        {"speculation": {"drafter": "d" * 10**6}},
        {"speculation": {"gamma": 10**4000}},
        {"temperature": 10**4000},
        {"response_format": {"type": "t" * 10**6}},
    ],
)
async def test_what_a_client_sent_is_not_sent_back_at_length(http: httpx.AsyncClient, change) -> None:
    content = json.dumps(TEXT | change)
    response = await http.post(
        "/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    assert 400 <= response.status_code < 500
    assert len(response.content) < 1000


async def test_routes_and_methods(http: httpx.AsyncClient) -> None:
    assert error(await http.get("/v1/nothing"), 404)["code"] == "unknown_url"
    response = await http.get("/v1/completions")
    assert response.headers["allow"] == "POST"
    assert "GET /v1/completions" in error(response, 405)["message"]
