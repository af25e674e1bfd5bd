"""The `langchain-openai` package."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import openai
from checks import API, KEY, LIMIT_S, MODEL, PROMPT, QUESTION, run
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

SERVER = {"base_url": API, "api_key": KEY, "model": MODEL, "timeout": LIMIT_S, "max_retries": 0}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(le=99)


def chat(**settings: Any) -> ChatOpenAI:
    return ChatOpenAI(**{"max_tokens": 16, "temperature": 0, **SERVER, **settings})


def completion(**settings: Any) -> str:
    return OpenAI(**{"max_tokens": 16, "temperature": 0, **SERVER, **settings}).invoke(PROMPT)


def whole_chat() -> None:
    reply = chat().invoke(QUESTION)
    assert reply.text
    assert reply.usage_metadata["output_tokens"] > 0


def streamed_chat_with_usage() -> None:
    events = list(chat(stream_usage=True).stream(QUESTION))
    assert "".join(event.text for event in events) == chat().invoke(QUESTION).text
    assert [event.usage_metadata["output_tokens"] for event in events if event.usage_metadata][-1] > 0


def conversation() -> None:
    first = chat().invoke(QUESTION)
    turns = [("system", "Be brief."), ("user", QUESTION), first, ("user", "And three more?")]
    assert chat().invoke(turns).text


def streamed_completion() -> None:
    model = OpenAI(max_tokens=16, temperature=0, **SERVER)
    assert "".join(model.stream(PROMPT)) == model.invoke(PROMPT)


def seed_repeats() -> None:
    first, second, other = (completion(seed=seed, temperature=1) for seed in (7, 7, 8))
    assert first == second != other


def two_choices() -> None:
    result = chat(n=2, seed=3, temperature=1).generate([[HumanMessage(QUESTION)]])
    assert len({choice.text for choice in result.generations[0]}) == 2


def stop_string() -> None:
    text = chat().invoke(QUESTION).text
    stop = text[8:12]
    assert chat().invoke(QUESTION, stop=[stop]).text == text[: text.index(stop)]


def unknown_parameter() -> None:
    rejected("temperatur", extra_body={"temperatur": 1})


def wrong_value() -> None:
    rejected("temperature", temperature=9)


def rejected(param: str, **settings: Any) -> None:
    try:
        chat(**settings).invoke(QUESTION)
    except openai.BadRequestError as error:
        assert error.param == param, error.param
    else:
        raise AssertionError("accepted")


def chat_logprobs() -> None:
    reply = chat(logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = reply.response_metadata["logprobs"]["content"]
    assert len(content) == reply.usage_metadata["output_tokens"]
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in content)


def structured_output() -> None:
    reader = chat(max_tokens=64).with_structured_output(Person, method="json_schema")
    assert isinstance(reader.invoke(QUESTION), Person)


if __name__ == "__main__":
    run(
        importlib.metadata.version("langchain-openai"),
        [
            whole_chat,
            streamed_chat_with_usage,
            conversation,
            streamed_completion,
            seed_repeats,
            two_choices,
            stop_string,
            unknown_parameter,
            wrong_value,
            chat_logprobs,
            structured_output,
        ],
    )
