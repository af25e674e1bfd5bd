"""Whole and streamed answers, through OpenAI's own client where it knows the shape."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

pytestmark = pytest.mark.anyio
CHAT = [{"role": "user", "content": "hi"}]
WHOLE = "Hello wörld"


async def sse(http: httpx.AsyncClient, path: str, body: dict) -> list:
    response = await http.post(path, json=body | {"stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.content.decode().split("\n\n")
    assert lines[-1] == ""
    data = [line.removeprefix("data: ") for line in lines[:-1]]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def test_chat_whole(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=CHAT)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == WHOLE
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        3,
        6,
        9,
    )
    assert answer.usage.prompt_tokens_details.cached_tokens == 5


async def test_chat_stream_equals_whole(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny", messages=CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content for c in chunks if c.choices) == WHOLE
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None, None, None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_completion_stream_is_one_event_per_engine_chunk(http: httpx.AsyncClient) -> None:
    events = await sse(http, "/v1/completions", {"model": "tiny", "prompt": "hi"})
    assert [e["choices"][0]["text"] for e in events[:-1]] == ["Hel", "lo ", "wörld"]
    assert events[-1] == "[DONE]"
    assert all("usage" not in e for e in events[:-1])


async def test_n_choices(client: openai.AsyncOpenAI, engine) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=CHAT, n=2)
    assert [c.message.content for c in answer.choices] == [WHOLE, "Hel1lo 1wörld1"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)
    assert answer.usage.prompt_tokens_details.cached_tokens == 5  # not what the second took from the first
    assert engine.requests[0].n == 2


async def test_n_choices_streamed(http: httpx.AsyncClient) -> None:
    events = (await sse(http, "/v1/chat/completions", {"model": "tiny", "messages": CHAT, "n": 2}))[:-1]
    texts = {0: "", 1: ""}
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["delta"]["content"]
    assert texts == {0: WHOLE, 1: "Hel1lo 1wörld1"}
    assert sum("role" in e["choices"][0]["delta"] for e in events) == 2
    assert ["metrics" in e for e in events] == [False] * (len(events) - 1) + [True]


async def test_several_prompts_are_numbered_as_openai_does(client: openai.AsyncOpenAI, engine) -> None:
    answer = await client.completions.create(model="tiny", prompt=["a", "bc"], n=2)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.text for c in answer.choices] == [WHOLE, "Hel1lo 1wörld1"] * 2
    assert [r.prompt for r in engine.requests] == [(97,), (98, 99)]
    assert answer.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [(97, 98)]),
        ([5, 6], [(5, 6)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
        ("", [(1,)]),
        (["", "a"], [(1,), (97,)]),
    ],
)
async def test_prompt_forms(http: httpx.AsyncClient, engine, prompt, ids) -> None:
    response = await http.post("/v1/completions", json={"model": "tiny", "prompt": prompt})
    assert response.status_code == 200
    assert [r.prompt for r in engine.requests] == ids


async def test_text_parts_and_an_answer_sent_back(http: httpx.AsyncClient, engine) -> None:
    answered = {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None, "annotations": []}
    parts = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
    messages = [{"role": "developer", "content": "a"}, answered, {"role": "user", "content": parts}]
    response = await http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
    assert response.status_code == 200
    assert bytes(engine.requests[0].prompt) == b"sa|ab|ucd"


async def test_parameters_reach_the_engine(http: httpx.AsyncClient, engine) -> None:
    body = {
        "model": "tiny",
        "prompt": "hi",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -1,
        "stop": ["a", "b"],
        "max_tokens": 9,
        "ignore_eos": True,
    }
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    s = engine.requests[0].sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p) == (0.5, 0.9, 7, 0.1)
    assert (s.seed, s.stop, s.max_tokens, s.ignore_eos) == (2**64 - 1, ("a", "b"), 9, True)


async def test_defaults(http: httpx.AsyncClient, engine) -> None:
    nothing = {
        "temperature": None,
        "top_p": None,
        "top_k": -1,
        "n": None,
        "stop": None,
        "seed": None,
        "speculation": None,
    }
    await http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"} | nothing)
    await http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", "stop": "x"})
    await http.post("/v1/chat/completions", json={"model": "tiny", "messages": CHAT})
    first, second, chat = (request.sampling for request in engine.requests)
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens, first.stop) == (
        1.0,
        1.0,
        0,
        16,
        (),
    )
    assert second.stop == ("x",)
    assert chat.max_tokens == 64 - 3
    assert len({first.seed, second.seed, chat.seed}) == 3  # drawn for each


async def test_max_tokens_is_a_bound_that_the_context_may_cut(http: httpx.AsyncClient, engine) -> None:
    body = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 1000}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    assert engine.requests[0].sampling.max_tokens == 61


async def test_one_drawn_seed_per_prompt(http: httpx.AsyncClient, engine) -> None:
    await http.post("/v1/completions", json={"model": "tiny", "prompt": ["a", "a"]})
    assert engine.requests[0].sampling.seed != engine.requests[1].sampling.seed
    await http.post("/v1/completions", json={"model": "tiny", "prompt": ["a", "a"], "seed": 4})
    assert [r.sampling.seed for r in engine.requests[2:]] == [4, 4]


async def test_metrics_of_all_choices(http: httpx.AsyncClient) -> None:
    body = {"model": "tiny", "prompt": "hi", "n": 2}
    metrics = (await http.post("/v1/completions", json=body)).json()["metrics"]["speculative_decoding"]
    assert metrics == {
        "state": "on",
        "drafter": "lookup",
        "gamma": 4,
        "width": 2,
        "rounds": 6,
        "drafted": 24,
        "accepted": 6,
        "tau": 2.0,
        "alpha": 0.5,
        "histogram": [0, 2, 2, 2],
        "num_spec_steps": 6,
        "num_draft_tokens": 24,
        "num_accepted_draft_tokens": 6,
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.25,
        "acceptance_histogram": [2, 2, 2],
        "notes": [],
    }
    events = await sse(http, "/v1/completions", body)
    assert events[-2]["metrics"]["speculative_decoding"] == metrics
    events = await sse(http, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert events[-2]["metrics"]["speculative_decoding"] == metrics
    assert ["metrics" in event for event in events[:-2]] == [False] * (len(events) - 2)


async def test_speculation_field(http: httpx.AsyncClient, engine) -> None:
    async def ask(**speculation) -> dict:
        body = {"model": "tiny", "prompt": "hi", "speculation": speculation}
        return (await http.post("/v1/completions", json=body)).json()["metrics"]["speculative_decoding"]

    clamped = await ask(drafter="other", gamma=9, width=1)
    assert (clamped["drafter"], clamped["gamma"], clamped["width"]) == ("other", 4, 1)
    assert clamped["notes"] == ["gamma 9 was cut to 4, the limit of this tenant"]
    off = await ask(enabled=False)
    assert (off["state"], off["drafter"], off["gamma"]) == ("off", None, 0)
    assert engine.requests[-1].plan.drafter is None


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [m.id async for m in await client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("org/other")


async def test_probes(http: httpx.AsyncClient, engine) -> None:
    from gammaray.errors import Overloaded

    engine.info_error = Overloaded("not yet", retry_after=3)
    assert (await http.get("/healthz")).status_code == 200
    response = await http.get("/readyz")
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    engine.info_error = None
    ready = (await http.get("/readyz")).json()
    assert (ready["status"], ready["model"]) == ("ready", "tiny")
    assert {"dtype", "device"} <= set(ready)


async def test_the_openapi_document_has_both_bodies(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/readyz"} <= set(document["paths"])
    prompt = document["components"]["schemas"]["CompletionBody"]["properties"]["prompt"]
    assert {"type": "string"} in prompt["anyOf"]
    assert document["components"]["schemas"]["ChatBody"]["additionalProperties"] is False
