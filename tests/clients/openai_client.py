"""The `openai` package for Python."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from checks import API, KEY, LIMIT_S, MESSAGES, MODEL, PERSON, PROMPT, RESPONSE_FORMAT, run
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=API, api_key=KEY, max_retries=0, timeout=LIMIT_S)


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(le=99)


def chat(**settings: Any) -> Any:
    settings = {"max_tokens": 16, "temperature": 0, **settings}
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, **settings)


def completion(**settings: Any) -> Any:
    settings = {"max_tokens": 16, "temperature": 0, **settings}
    return client.completions.create(model=MODEL, prompt=PROMPT, **settings)


def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def whole_chat() -> None:
    reply = chat()
    assert reply.choices[0].message.content
    assert reply.choices[0].message.role == "assistant"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def streamed_chat_with_usage() -> None:
    events = list(chat(stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for event in events for choice in event.choices)
    assert text == chat().choices[0].message.content
    assert events[-1].usage.completion_tokens > 0


def stream_helper() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, max_completion_tokens=16, temperature=0
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    assert text == chat().choices[0].message.content


def async_chat() -> None:
    async def ask() -> str | None:
        async with openai.AsyncOpenAI(base_url=API, api_key=KEY, max_retries=0, timeout=LIMIT_S) as own:
            reply = await own.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=16, temperature=0
            )
            return reply.choices[0].message.content

    assert asyncio.run(ask()) == chat().choices[0].message.content


def seed_repeats() -> None:
    first, second, other = (completion(seed=seed, temperature=1).choices[0].text for seed in (7, 7, 8))
    assert first == second != other


def two_choices() -> None:
    reply = chat(n=2, seed=3, temperature=1)
    assert len({choice.message.content for choice in reply.choices}) == 2


def stop_string() -> None:
    text = completion().choices[0].text
    stop = text[8:12]
    choice = completion(stop=stop).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == text[: text.index(stop)]


def unknown_parameter() -> None:
    rejected("temperatur", extra_body={"temperatur": 1})


def wrong_value() -> None:
    rejected("temperature", temperature=9)


def rejected(param: str, **settings: Any) -> None:
    try:
        chat(**settings)
    except openai.BadRequestError as error:
        assert error.param == param, error.param
        assert error.type == "invalid_request_error"
    else:
        raise AssertionError("accepted")


def unknown_model() -> None:
    try:
        client.completions.create(model="nobody", prompt=PROMPT)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error.code
    else:
        raise AssertionError("accepted")


def chat_logprobs() -> None:
    content = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(content) == chat().usage.completion_tokens
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in content)
    assert all(entry.logprob == max(top.logprob for top in entry.top_logprobs) for entry in content)


def completion_logprobs() -> None:
    reply = completion(logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert "".join(logprobs.tokens) == reply.choices[0].text
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == reply.usage.completion_tokens


def json_schema() -> None:
    text = chat(max_tokens=64, response_format=RESPONSE_FORMAT).choices[0].message.content
    assert set(json.loads(text)) == set(PERSON["properties"])


def parsed_into_a_class() -> None:
    reply = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, max_tokens=64, temperature=0, response_format=Person
    )
    assert isinstance(reply.choices[0].message.parsed, Person)


if __name__ == "__main__":
    run(
        openai.__version__,
        [
            models,
            whole_chat,
            streamed_chat_with_usage,
            stream_helper,
            async_chat,
            seed_repeats,
            two_choices,
            stop_string,
            unknown_parameter,
            wrong_value,
            unknown_model,
            chat_logprobs,
            completion_logprobs,
            json_schema,
            parsed_into_a_class,
        ],
    )
