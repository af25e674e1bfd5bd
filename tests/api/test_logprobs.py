"""Log-probabilities of answers and echoed prompts, on both routes, whole and streamed."""

from __future__ import annotations

import math
from dataclasses import replace

import httpx
import openai
import pytest
from support.sse import events

from gammaray.api import logprobs
from gammaray.api.tokens import TextPosition, Vocabulary
from gammaray.types import Logprobs, TokenChunk

pytestmark = pytest.mark.anyio
TEXT = {"model": "tiny", "prompt": "hi"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
SAID = "Hello wörld"


async def ask(http: httpx.AsyncClient, route: str, body: dict) -> dict:
    response = await http.post(f"/v1/{route}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(http: httpx.AsyncClient, route: str, body: dict) -> list[dict]:
    response = await http.post(f"/v1/{route}", json=body | {"stream": True})
    assert response.status_code == 200, response.text
    return events(response.content)


async def test_nobody_asked(http: httpx.AsyncClient, engine) -> None:
    for extra in ({}, {"logprobs": False}, {"logprobs": False, "top_logprobs": 0}):
        assert (await ask(http, "chat/completions", CHAT | extra))["choices"][0]["logprobs"] is None
    assert (await ask(http, "completions", TEXT | {"echo": True}))["choices"][0]["logprobs"] is None
    assert {(r.sampling.logprobs, r.sampling.prompt_logprobs) for r in engine.requests} == {(None, None)}


async def test_chat(client: openai.AsyncOpenAI, engine) -> None:
    answer = await client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    assert (engine.requests[0].sampling.logprobs, engine.requests[0].sampling.prompt_logprobs) == (2, None)
    content = answer.choices[0].logprobs.content
    assert [(entry.token, entry.logprob, entry.bytes) for entry in content[:3]] == [
        ("<end>", 0.0, []),
        ("\x01", -0.125, [1]),
        ("\x02", -0.25, [2]),
    ]
    assert len(content) == answer.usage.completion_tokens == 6
    for entry in content:
        assert [(best.token, best.logprob, best.bytes) for best in entry.top_logprobs] == [
            ("\x01", -0.125, [1]),
            ("\x02", -0.25, [2]),
        ]
    assert answer.choices[0].logprobs.refusal is None


async def test_chat_without_the_best(http: httpx.AsyncClient, engine) -> None:
    choice = (await ask(http, "chat/completions", CHAT | {"logprobs": True}))["choices"][0]
    assert engine.requests[0].sampling.logprobs == 0
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[]] * 6


async def test_each_event_of_a_chat_has_the_entries_of_its_tokens(http: httpx.AsyncClient) -> None:
    body = CHAT | {"logprobs": True, "n": 2}
    whole = (await ask(http, "chat/completions", body))["choices"]
    choices = [event["choices"][0] for event in await stream(http, "chat/completions", body)]
    assert [c["logprobs"] for c in choices if "role" in c["delta"]] == [None, None]
    pieces = [c for c in choices if "role" not in c["delta"]]
    assert [len(c["logprobs"]["content"]) for c in pieces] == [2] * 6
    for index in (0, 1):
        entries = [e for c in pieces if c["index"] == index for e in c["logprobs"]["content"]]
        assert entries == whole[index]["logprobs"]["content"]


async def test_completion(http: httpx.AsyncClient, engine) -> None:
    choice = (await ask(http, "completions", TEXT | {"logprobs": 1}))["choices"][0]
    assert choice["text"] == SAID
    assert choice["logprobs"] == {
        "tokens": ["<end>", "\x01", "\x02", "\x03", "\x04", "\x05"],
        "token_logprobs": [0.0, -0.125, -0.25, -0.375, -0.5, -0.625],
        "top_logprobs": [
            {"\x01": -0.125, "<end>": 0.0},
            {"\x01": -0.125},
            *({"\x01": -0.125, chr(i): -i / 8} for i in range(2, 6)),
        ],
        "text_offset": [0, 0, 1, 2, 3, 4],
    }
    assert engine.requests[0].sampling.prompt_logprobs is None
    none = (await ask(http, "completions", TEXT | {"logprobs": 0}))["choices"][0]["logprobs"]
    assert none["top_logprobs"][1:3] == [{"\x01": -0.125}, {"\x02": -0.25}]


async def test_echo(http: httpx.AsyncClient, engine) -> None:
    choice = (await ask(http, "completions", TEXT | {"logprobs": 0, "echo": True}))["choices"][0]
    sampling = engine.requests[0].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (0, 0)
    assert choice["text"] == "hi" + SAID
    found = choice["logprobs"]
    assert found["tokens"][:4] == ["h", "i", "<end>", "\x01"]
    assert found["token_logprobs"][:4] == [None, -105 / 8, 0.0, -0.125]
    assert found["top_logprobs"][:2] == [None, {"i": -105 / 8}]
    assert found["text_offset"] == [0, 1, 2, 2, 3, 4, 5, 6]


async def test_echo_of_each_prompt_and_choice(http: httpx.AsyncClient) -> None:
    body = TEXT | {"prompt": [list("ß".encode()), [104, 105, 0]], "echo": True, "n": 2, "logprobs": 0}
    answer = await ask(http, "completions", body)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [text[: text.index("H")] for text in texts] == ["ß", "ß", "hi<end>", "hi<end>"]
    offsets = [choice["logprobs"]["text_offset"] for choice in answer["choices"]]
    assert offsets[0] == offsets[1] == [0, 0, 1, 1, 2, 3, 4, 5]
    assert offsets[2] == offsets[3] == [0, 1, 2, 7, 7, 8, 9, 10, 11]
    assert answer["choices"][0]["logprobs"]["tokens"][:2] == ["bytes:\\xc3", "bytes:\\x9f"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 24)


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}])
async def test_a_stream_begins_with_the_echo(http: httpx.AsyncClient, extra) -> None:
    body = TEXT | {"echo": True, "n": 2} | extra
    first = [e["choices"][0] for e in (await stream(http, "completions", body))[:2]]
    assert [choice["text"] for choice in first] == ["hiHel", "hiHel1"]
    if extra:
        assert [len(choice["logprobs"]["tokens"]) for choice in first] == [4, 4]


async def test_choices_wait_for_the_one_that_brings_the_prompt(http: httpx.AsyncClient, engine) -> None:
    """Its first text may be held back longer than theirs."""
    generate = engine.generate

    async def late(request):
        chunks = [chunk async for chunk in generate(request)]
        for chunk in sorted(chunks, key=lambda chunk: -chunk.sequence):
            yield chunk

    engine.generate = late
    body = TEXT | {"echo": True, "n": 3, "logprobs": 0}
    for choice in (await ask(http, "completions", body))["choices"]:
        assert choice["logprobs"]["token_logprobs"][:2] == [None, -105 / 8]
        assert len(choice["logprobs"]["tokens"]) == 8
    order = [event["choices"][0]["index"] for event in await stream(http, "completions", body)]
    assert order == [0, 1, 1, 1, 2, 2, 2, 0, 0]


async def test_a_prompt_alone_is_scored(http: httpx.AsyncClient, engine) -> None:
    engine.rounds = ("x",)
    body = TEXT | {"echo": True, "max_tokens": 0, "logprobs": 1, "n": 2}
    answer = await ask(http, "completions", body)
    assert engine.requests[0].sampling.max_tokens == 1
    for choice in answer["choices"]:
        assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
        assert choice["logprobs"]["tokens"] == ["h", "i"]
        assert choice["logprobs"]["token_logprobs"] == [None, -105 / 8]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == 2
    assert answer["metrics"]["speculative_decoding"]["drafted"] == 0
    streamed = await stream(http, "completions", body | {"stream_options": {"include_usage": True}})
    assert [event["choices"][0] for event in streamed[:-1]] == answer["choices"]
    assert streamed[-1]["usage"] == answer["usage"]


async def test_bounds(http: httpx.AsyncClient) -> None:
    async def refused(route: str, body: dict) -> tuple[str, str]:
        response = await http.post(f"/v1/{route}", json=body)
        assert response.status_code == 400, response.text
        return response.json()["error"]["param"], response.json()["error"]["message"]

    for value in (-1, 21, True, "1"):
        assert (await refused("completions", TEXT | {"logprobs": value}))[0] == "logprobs"
        chat = CHAT | {"logprobs": True, "top_logprobs": value}
        assert (await refused("chat/completions", chat))[0] == "top_logprobs"
    assert (await refused("chat/completions", CHAT | {"logprobs": 1}))[0] == "logprobs"
    param, message = await refused("chat/completions", CHAT | {"top_logprobs": 1})
    assert param == "top_logprobs" and "logprobs: true" in message
    assert (await refused("chat/completions", CHAT | {"echo": True}))[0] == "echo"
    param, message = await refused("completions", TEXT | {"max_tokens": 0})
    assert param == "max_tokens" and "echo" in message
    assert (await refused("chat/completions", CHAT | {"max_tokens": 0}))[0] == "max_tokens"


async def test_json_has_no_infinity(http: httpx.AsyncClient, engine) -> None:
    def masked(request, sequence, number, text):
        worst = Logprobs(-math.inf, ((7, math.nan), (8, -math.inf)))
        return TokenChunk(request.request_id, sequence, 0, (7,), "\x07", "stop", logprobs=(worst,))

    engine.rounds, engine._chunk = ("x",), masked
    choice = (await ask(http, "completions", TEXT | {"logprobs": 2}))["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]
    assert choice["logprobs"]["top_logprobs"] == [{"\x07": -9999.0, "\x08": -9999.0}]


async def test_of_two_tokens_with_one_text_the_better_stays(tokenizer) -> None:
    tokenizer.decode = lambda ids, **_: "a" * len(ids)
    found = Logprobs(-3.0, ((5, -1.0), (6, -2.0)))
    entries = logprobs.generated((7,), (found,), TextPosition(), Vocabulary(tokenizer))
    assert logprobs.completion(entries)["top_logprobs"] == [{"a": -1.0}]


async def test_an_echo_is_aligned_at_its_end(tokenizer) -> None:
    """A tokenizer may put a token or a space in front that the text does not have."""
    entries = logprobs.of_prompt((0, 32, 104, 105), (None,) * 4, "hi", Vocabulary(tokenizer))
    assert [entry.offset for entry in entries] == [0, 0, 0, 1]


async def test_missing_logprobs_are_a_failure_not_a_shift(http: httpx.AsyncClient, engine) -> None:
    chunk = engine._chunk
    engine._chunk = lambda *args: replace(chunk(*args), logprobs=())
    response = await http.post("/v1/completions", json=TEXT | {"logprobs": 1})
    assert response.status_code == 500


async def test_b9_a_boolean_on_the_completions_route_is_refused_and_the_server_lives(
    http: httpx.AsyncClient,
) -> None:
    body = {"model": "tiny", "prompt": "hi"}
    refused = await http.post("/v1/completions", json=body | {"logprobs": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    assert (await http.post("/v1/completions", json=body | {"logprobs": 1})).status_code == 200
