"""The request bodies of `/v1/completions` and `/v1/chat/completions`.

A field of OpenAI's (or of a well-known server's) that this version lacks is taken at the value that
asks for nothing; any other value, and any unknown field, is a 400.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from gammaray.api import later
from gammaray.api.fields import (
    MAX_INT,
    MAX_TOP,
    BadWords,
    Biases,
    Content,
    Prompts,
    Role,
    StopIds,
    Stops,
)
from gammaray.api.formats import ResponseFormat, StructuredOutputs
from gammaray.types import Grammar
from gammaray.validation import Planned, Strict

MAX_MESSAGES = 2048
MAX_NAME = 1024  # characters of a name that an error may repeat
DAY_S = 86_400


class StreamOptions(Strict):
    planned: ClassVar[Planned] = later.STREAM_OPTIONS
    include_usage: bool = False


class SpeculationField(Strict):
    """Per-request control, inside the tenant's policy."""

    enabled: bool | None = None
    drafter: str | None = Field(default=None, max_length=MAX_NAME)
    gamma: int | None = Field(default=None, ge=0, le=MAX_INT)  # 0: plain decoding
    width: int | None = Field(default=None, ge=1, le=MAX_INT)


class GenerationBody(Strict):
    """What both routes share. `max_tokens` is a bound: the model's length may end a text earlier."""

    model: str = Field(max_length=MAX_NAME)
    n: int | None = Field(default=None, ge=1, le=16)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
    min_tokens: int | None = Field(default=None, ge=0, le=MAX_INT)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INT)  # -1 and 0: off
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**64 - 1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)  # 1: off
    logit_bias: Biases = Field(default_factory=list)
    bad_words: BadWords = Field(default_factory=list)
    stop: Stops = Field(default_factory=list)
    stop_token_ids: StopIds = Field(default_factory=list)
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationField | None = None
    priority: int | None = Field(default=None, ge=-(2**31), le=MAX_INT)  # lower runs earlier
    timeout: float | None = Field(default=None, gt=0, le=DAY_S)  # seconds
    user: str | None = None  # labels: no effect on the text
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """Best tokens to report beside each; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        """The prompt is part of the answer."""
        return False

    @property
    def grammar(self) -> Grammar | None:
        asked = self.structured_outputs or self.response_format
        return asked.grammar if asked else None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream", "needs stream: true", {"key": "stream_options"})
        return self

    @model_validator(mode="after")
    def _one_grammar(self) -> GenerationBody:
        if self.structured_outputs and self.response_format and self.response_format.grammar:
            raise _conflict("structured_outputs", "give it or response_format, not both")
        if self.grammar and self.ignore_eos:
            raise _conflict("ignore_eos", "must be false under a grammar, which ends the text itself")
        return self

    @model_validator(mode="after")
    def _least_below_most(self) -> GenerationBody:
        if self.token_limit is not None and (self.min_tokens or 0) > self.token_limit:
            raise _conflict("min_tokens", "must not exceed max_tokens")
        return self


class CompletionBody(GenerationBody):
    """`max_tokens` 0 with `echo`: the prompt alone, for its log-probabilities."""

    planned: ClassVar[Planned] = later.COMPLETION
    prompt: Prompts
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_INT)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP)
    echo: bool | None = None

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @model_validator(mode="after")
    def _something_to_answer(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise _conflict("max_tokens", "must be at least 1, or 0 together with echo")
        return self


class Message(Strict):
    """One turn. Fields that OpenAI's own answers carry are taken back when they are empty."""

    planned: ClassVar[Planned] = later.MESSAGE
    reasons: ClassVar[Mapping[str, str]] = later.MESSAGE_REASONS
    role: Role
    content: Content


class ChatBody(GenerationBody):
    """`continue_final_message`: the answer goes on where the last message, the assistant's, ends."""

    planned: ClassVar[Planned] = later.CHAT
    reasons: ClassVar[Mapping[str, str]] = later.CHAT_REASONS
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP)
    add_generation_prompt: bool | None = None  # None: unless the last message is continued
    continue_final_message: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise _conflict("max_tokens", "give it or max_completion_tokens, not both")
        return self

    @model_validator(mode="after")
    def _top_of_something(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise _conflict("top_logprobs", "needs logprobs: true")
        return self

    @model_validator(mode="after")
    def _continues_the_assistant(self) -> ChatBody:
        if self.continue_final_message and self.add_generation_prompt:
            raise _conflict("add_generation_prompt", "must be false to continue the last message")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise _conflict("continue_final_message", "needs a last message of the assistant")
        return self


def _conflict(key: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("conflict", message, {"key": key})
