"""Every parameter: its range, on both routes and in the OpenAPI document, and its way to the engine."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest

from gammaray.types import Grammar, SamplingParams

pytestmark = pytest.mark.anyio
BODIES = {
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
}
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
BIG = 10**40


@pytest.fixture(params=list(BODIES))
def route(request: pytest.FixtureRequest) -> str:
    return request.param


async def post(http: httpx.AsyncClient, route: str, fields: dict) -> httpx.Response:
    content = json.dumps(BODIES[route] | fields)  # writes NaN and Infinity as Python reads them
    return await http.post(route, content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"presence_penalty": -2, "frequency_penalty": 2.0},
            {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        ),
        ({"repetition_penalty": 10}, {"repetition_penalty": 10.0}),
        ({"repetition_penalty": None}, {"repetition_penalty": 1.0}),
        ({"logit_bias": {"255": -100, "0": 0.5}}, {"logit_bias": ((255, -100.0), (0, 0.5))}),
        ({"logit_bias": None, "bad_words": None, "stop_token_ids": None}, {}),
        ({"min_tokens": 3, "max_tokens": 3}, {"min_tokens": 3, "max_tokens": 3}),
        ({"stop_token_ids": [0, 255]}, {"stop_token_ids": (0, 255)}),
        ({"bad_words": ["ab"]}, {"bad_words": ((97, 98), (32, 97, 98))}),
        ({"bad_words": ["  ab", "ab", "\n"]}, {"bad_words": ((97, 98), (32, 97, 98), (10,), (32, 10))}),
        ({"bad_words": [" "]}, {"bad_words": ((32,),)}),
        ({"stop": ["x" * 256] * 4}, {"stop": ("x" * 256,) * 4}),
        ({"response_format": {"type": "text"}}, {"grammar": None}),
        ({"response_format": {"type": "json_object"}}, {"grammar": Grammar("json_object")}),
        (
            {
                "response_format": FORMAT
                | {"json_schema": {"name": "thing", "schema": SCHEMA, "strict": False}}
            },
            {"grammar": Grammar("json_schema", '{"type":"object","properties":{"é":{"type":"integer"}}}')},
        ),
        ({"structured_outputs": {"regex": "[ab]+"}}, {"grammar": Grammar("regex", "[ab]+")}),
        ({"response_format": {"type": "text"}, "ignore_eos": True}, {"ignore_eos": True}),
        ({"temperature": 0, "n": 16}, {"temperature": 0.0}),
        ({"user": "u", "safety_identifier": "s", "prompt_cache_key": "k"}, {}),
    ],
)
async def test_reaches_the_engine(http: httpx.AsyncClient, engine, route: str, fields, expected) -> None:
    response = await post(http, route, fields | {"seed": 5})
    assert response.status_code == 200, response.text
    found = engine.requests[0].sampling
    assert found == replace(SamplingParams(seed=5, max_tokens=found.max_tokens), **expected)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty", "2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "-2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0.01"),
        ({"repetition_penalty": 10.5}, "repetition_penalty", "10"),
        ({"logit_bias": {"256": 1}}, "logit_bias", "vocabulary of 256"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "token id"),
        ({"logit_bias": {"05": 1}}, "logit_bias", "token id"),
        ({"logit_bias": {"٣": 1}}, "logit_bias", "token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
        ({"logit_bias": {"5": "1"}}, "logit_bias", "-100 to 100"),
        ({"logit_bias": {"5": True}}, "logit_bias", "-100 to 100"),
        ({"logit_bias": {"5": None}}, "logit_bias", "-100 to 100"),
        ({"logit_bias": {"5": BIG}}, "logit_bias", "-100 to 100"),
        ({"logit_bias": [5]}, "logit_bias", "must map"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 0)}, "logit_bias", "1024"),
        ({"min_tokens": -1}, "min_tokens", "0"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens", "max_tokens"),
        ({"min_tokens": 63}, "min_tokens", "tokens"),
        ({"min_tokens": 63, "max_tokens": 63}, "min_tokens", "tokens"),
        ({"stop_token_ids": [256]}, "stop_token_ids", "vocabulary of 256"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "vocabulary"),
        ({"stop_token_ids": [BIG]}, "stop_token_ids", "vocabulary"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids", "token ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids", "token ids"),
        ({"stop_token_ids": 5}, "stop_token_ids", "list"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", "64"),
        ({"bad_words": "ab"}, "bad_words", "list"),
        ({"bad_words": [""]}, "bad_words", "1 to 256"),
        ({"bad_words": [5]}, "bad_words", "texts"),
        ({"bad_words": ["x" * 257]}, "bad_words", "256"),
        ({"bad_words": ["x"] * 129}, "bad_words", "128"),
        ({"stop": "x" * 257}, "stop", "256"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
        ({"response_format": "json_object"}, "response_format", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs it"),
        ({"response_format": {**FORMAT, "type": "json_object"}}, "response_format.json_schema", "belongs to"),
        (
            {"response_format": {**FORMAT, "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "",
        ),
        (
            {"response_format": {**FORMAT, "json_schema": {"name": "x", "shema": {}}}},
            "response_format.json_schema.shema",
            "'schema'",
        ),
        (
            {"response_format": {**FORMAT, "json_schema": {"name": "x", "schema": {"const": "x" * 65536}}}},
            "response_format.json_schema.schema",
            "65536",
        ),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "1"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice", "not supported yet"),
        ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "structured_outputs", "not both"),
        ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos", "grammar"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "grammar"),
        ({"priority": 2**31}, "priority", "2147483647"),
        ({"priority": 1.5}, "priority", "integer"),
        ({"timeout": 0}, "timeout", "greater than 0"),
        ({"timeout": 86401}, "timeout", "86400"),
        ({"seed": BIG}, "seed", "18446744073709551615"),
        ({"seed": True}, "seed", "integer"),
        ({"top_k": 2**31}, "top_k", "2147483647"),
        ({"n": True}, "n", "integer"),
        ({"user": 5}, "user", "string"),
    ],
)
async def test_out_of_range(http: httpx.AsyncClient, engine, fields, param, says) -> None:
    for route in BODIES:
        response = await post(http, route, fields)
        assert response.status_code == 400, response.text
        fault = response.json()["error"]
        assert fault["param"] == param
        assert says in fault["message"]
    assert engine.requests == []


FLOATS = [
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "timeout",
]
INTEGERS = ["n", "seed", "max_tokens", "min_tokens", "top_k", "priority"]


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "true", '"1"', f"{10**400}"]
)
async def test_numbers_that_are_none(http: httpx.AsyncClient, engine, route: str, value) -> None:
    for name in FLOATS + INTEGERS:
        content = json.dumps(BODIES[route])[:-1] + f', "{name}": {value}}}'
        response = await http.post(route, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400, (name, response.text)
    assert engine.requests == []


async def test_infinity_inside_a_schema(http: httpx.AsyncClient, route: str) -> None:
    schema = '{"name": "x", "schema": {"maximum": 1e999}}'
    content = json.dumps(BODIES[route])[:-1]
    content += f', "response_format": {{"type": "json_schema", "json_schema": {schema}}}}}'
    response = await http.post(route, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "JSON does not have" in response.json()["error"]["message"]


async def test_a_bad_word_without_tokens(http: httpx.AsyncClient, engine, tokenizer, route: str) -> None:
    encode = tokenizer.encode
    tokenizer.encode = lambda text, **kw: encode(text.strip("\u200b "), **kw)
    response = await post(http, route, {"bad_words": ["a", "\u200b"]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "bad_words"
    assert "text 2 of 2" in response.json()["error"]["message"]


async def test_the_openapi_document_has_every_field_and_range(http: httpx.AsyncClient) -> None:
    schemas = (await http.get("/openapi.json")).json()["components"]["schemas"]
    for body in ("CompletionBody", "ChatBody"):
        fields = schemas[body]["properties"]

        def limits(name: str, fields: dict = fields) -> dict:
            return next(kind for kind in fields[name]["anyOf"] if kind["type"] != "null")

        number = limits("presence_penalty")
        assert (number["minimum"], number["maximum"]) == (-2, 2)
        assert limits("frequency_penalty")["maximum"] == 2
        assert limits("repetition_penalty")["minimum"] == 0.01
        assert limits("min_tokens")["minimum"] == 0
        assert limits("priority")["minimum"] == -(2**31)
        assert limits("timeout")["exclusiveMinimum"] == 0
        assert limits("logit_bias")["maxProperties"] == 1024
        assert limits("bad_words")["maxItems"] == 128
        assert limits("stop_token_ids")["maxItems"] == 64
        assert limits("stop") == {"type": "string", "minLength": 1, "maxLength": 256}
        assert {"response_format", "structured_outputs", "stream_options", "ignore_eos"} <= set(fields)
    assert {"echo", "logprobs"} <= set(schemas["CompletionBody"]["properties"])
    chat = schemas["ChatBody"]["properties"]
    assert {"logprobs", "top_logprobs", "add_generation_prompt", "continue_final_message"} <= set(chat)
    assert chat["messages"]["maxItems"] == 2048
    assert schemas["JsonSchema"]["required"] == ["name", "schema"]
