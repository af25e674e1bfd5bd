"""The request bodies of `/v1/completions` and `/v1/chat/completions`.

A field of OpenAI's (or of a well-known server's) that this version lacks is taken at the value that
asks for nothing; any other value, and any unknown field, is a 400.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from gammaray.api.fields import Content, Prompts, Role, Stops
from gammaray.validation import Planned, Strict

_LATER: Planned = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "min_tokens": (None, 0),
    "bad_words": (None, []),
    "stop_token_ids": (None, []),
    "response_format": (None, {"type": "text"}),
    "priority": (None, 0),
    "timeout": (None,),
}


class StreamOptions(Strict):
    planned: ClassVar[Planned] = {"include_obfuscation": (None, False)}
    include_usage: bool = False


class SpeculationField(Strict):
    """Per-request control, inside the tenant's policy."""

    enabled: bool | None = None
    drafter: str | None = None
    gamma: int | None = Field(default=None, ge=0)  # 0: plain decoding
    width: int | None = Field(default=None, ge=1)


class GenerationBody(Strict):
    """What both routes share. `max_tokens` is a bound: the model's length may end a text earlier."""

    model: str
    n: int | None = Field(default=None, ge=1, le=16)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)  # -1 and 0: off
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**64 - 1)
    stop: Stops = Field(default_factory=list)
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationField | None = None
    user: str | None = None  # a label: no effect on the text

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream", "needs stream: true", {"key": "stream_options"})
        return self


class CompletionBody(GenerationBody):
    planned: ClassVar[Planned] = {
        **_LATER,
        "logprobs": (None,),
        "echo": (None, False),
        "best_of": (None, 1),
        "suffix": (None, ""),
    }
    prompt: Prompts


class Message(Strict):
    """One turn. Fields that OpenAI's own answers carry are taken back when they are empty."""

    planned: ClassVar[Planned] = {
        "name": (None,),
        "refusal": (None,),
        "audio": (None,),
        "annotations": (None, []),
        "function_call": (None,),
        "tool_calls": (None, []),
        "tool_call_id": (None,),
    }
    role: Role
    content: Content


class ChatBody(GenerationBody):
    planned: ClassVar[Planned] = {
        **_LATER,
        "logprobs": (None, False),
        "top_logprobs": (None, 0),
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "parallel_tool_calls": (None, True, False),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "reasoning_effort": (None,),
        "verbosity": (None,),
        "web_search_options": (None,),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "metadata": (None, {}),
    }
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise PydanticCustomError(
                "limit", "give it or max_completion_tokens, not both", {"key": "max_tokens"}
            )
        return self
