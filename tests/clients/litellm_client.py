"""The `litellm` package, with this server as an OpenAI-compatible provider."""

from __future__ import annotations

import importlib.metadata
import json
import os
from typing import Any

from checks import API, KEY, LIMIT_S, MESSAGES, MODEL, PERSON, PROMPT, RESPONSE_FORMAT, run

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its list of prices would come from the network
import litellm

litellm.suppress_debug_info = True
SERVER = {"api_base": API, "api_key": KEY, "timeout": LIMIT_S, "num_retries": 0}


def chat(**settings: Any) -> Any:
    settings = {"max_tokens": 16, "temperature": 0, **SERVER, **settings}
    return litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, **settings)


def completion(**settings: Any) -> Any:
    settings = {"max_tokens": 16, "temperature": 0, **SERVER, **settings}
    return litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=PROMPT, **settings)


def whole_chat() -> None:
    reply = chat()
    assert reply.choices[0].message.content
    assert reply.usage.completion_tokens > 0


def streamed_chat_with_usage() -> None:
    events = list(chat(stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for event in events for choice in event.choices)
    assert text == chat().choices[0].message.content
    assert events[-1].usage.completion_tokens > 0


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
    rejected("temperatur", temperatur=1)


def wrong_value() -> None:
    rejected("temperature", temperature=9)


def rejected(param: str, **settings: Any) -> None:
    try:
        chat(**settings)
    except litellm.BadRequestError as error:
        assert param in str(error)
    else:
        raise AssertionError("accepted")


def chat_logprobs() -> None:
    content = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(content) == chat().usage.completion_tokens
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in content)


def json_schema() -> None:
    text = chat(max_tokens=64, response_format=RESPONSE_FORMAT).choices[0].message.content
    assert set(json.loads(text)) == set(PERSON["properties"])


if __name__ == "__main__":
    run(
        importlib.metadata.version("litellm"),
        [
            whole_chat,
            streamed_chat_with_usage,
            seed_repeats,
            two_choices,
            stop_string,
            unknown_parameter,
            wrong_value,
            chat_logprobs,
            json_schema,
        ],
    )
