"""Prompts become token ids."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError

from gammaray.api.client import Tokenizer
from gammaray.api.schema import Message
from gammaray.errors import InvalidRequest
from gammaray.types import ModelInfo


def completion_ids(prompt: str | list[int], tokenizer: Tokenizer, info: ModelInfo) -> tuple[int, ...]:
    """Token ids of one prompt. An empty text starts at BOS, if the model has one.

    Raises InvalidRequest for an id outside the vocabulary, an empty prompt without BOS, or one that
    leaves no room for an answer.
    """
    ids = tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    if not ids:
        ids = _bos(tokenizer)
    wrong = next((i for i in ids if not 0 <= i < info.vocab_size), None)
    if wrong is not None:
        message = f"token id {wrong} is outside the vocabulary of {info.vocab_size}"
        raise InvalidRequest(message, param="prompt", code="invalid_value")
    return _checked(ids, "prompt", info)


def chat_ids(messages: Sequence[Message], tokenizer: Tokenizer, info: ModelInfo) -> tuple[int, ...]:
    """Token ids of a conversation by the checkpoint's template, up to where the assistant speaks.

    Raises InvalidRequest when there is no template, when it refuses these messages, or when they are
    too long.
    """
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    except (TemplateError, ValueError, TypeError) as error:
        message = f"the model's chat template refuses these messages: {error}"
        raise InvalidRequest(message, param="messages", code="chat_template") from error
    return _checked(tuple(ids), "messages", info)


def _bos(tokenizer: Tokenizer) -> tuple[int, ...]:
    if tokenizer.bos_token_id is None:
        message = "the prompt is empty and this model has no token that begins a text"
        raise InvalidRequest(message, param="prompt", code="empty_prompt")
    return (tokenizer.bos_token_id,)


def _checked(ids: tuple[int, ...], param: str, info: ModelInfo) -> tuple[int, ...]:
    if len(ids) < info.max_model_len:
        return ids
    message = (
        f"the prompt has {len(ids)} tokens, but this model's context is {info.max_model_len} tokens "
        "for prompt and answer together"
    )
    raise InvalidRequest(message, param=param, code="context_length_exceeded")
