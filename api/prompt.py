"""What the tokenizer makes of a body: the prompts' token ids, and those of its bad words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gammaray.api.schema import ChatBody, CompletionBody
from gammaray.api.tokens import Vocabulary
from gammaray.errors import InvalidRequest, Unprocessable
from gammaray.types import ModelInfo
from gammaray.validation import shorten


@dataclass(frozen=True, slots=True)
class Inputs:
    """`texts`: one for each prompt if the answer repeats them, else none."""

    vocabulary: Vocabulary
    prompts: tuple[tuple[int, ...], ...]
    bad_words: tuple[tuple[int, ...], ...] = ()
    texts: tuple[str, ...] = ()


def completion_inputs(body: CompletionBody, vocabulary: Vocabulary, info: ModelInfo) -> Inputs:
    """Raises InvalidRequest for an id outside the vocabulary, an empty prompt without a token to begin a
    text, one that leaves no room for an answer, or a bad word without tokens."""
    prompts = tuple(_completion_ids(prompt, vocabulary, info) for prompt in body.prompt)
    texts = tuple(prompt if isinstance(prompt, str) else vocabulary.text(prompt) for prompt in body.prompt)
    return Inputs(vocabulary, prompts, _bad_words(body.bad_words, vocabulary), texts if body.echoes else ())


def chat_inputs(body: ChatBody, vocabulary: Vocabulary, info: ModelInfo) -> Inputs:
    """The conversation by the checkpoint's template, up to where the assistant speaks or goes on.

    Raises Unprocessable when there is no template or it refuses these messages, and InvalidRequest when
    they are too long or for a bad word without tokens.
    """
    return Inputs(vocabulary, (_chat_ids(body, vocabulary, info),), _bad_words(body.bad_words, vocabulary))


def check_ids(ids: Sequence[int], param: str, info: ModelInfo) -> None:
    """Raises InvalidRequest for an id outside the vocabulary."""
    wrong = next((at for at, token in enumerate(ids) if not 0 <= token < info.vocab_size), None)
    if wrong is not None:
        place = f"number {wrong + 1} of {len(ids)} token ids in {param}"
        message = f"{place} is outside the vocabulary of {info.vocab_size} tokens"
        raise InvalidRequest(message, param=param, code="invalid_value")


def _completion_ids(prompt: str | list[int], vocabulary: Vocabulary, info: ModelInfo) -> tuple[int, ...]:
    """Token ids of one prompt. An empty text starts at BOS, if the model has one."""
    if isinstance(prompt, str):
        _check_size(len(prompt.encode()), "prompt", vocabulary, info)
        ids = vocabulary.tokenizer.encode(prompt) or _bos(vocabulary)
    else:
        ids = prompt
    _check_length(len(ids), "prompt", info)
    check_ids(ids, "prompt", info)
    return tuple(ids)


def _chat_ids(body: ChatBody, vocabulary: Vocabulary, info: ModelInfo) -> tuple[int, ...]:
    _check_size(sum(len(m.content.encode()) for m in body.messages), "messages", vocabulary, info)
    continues = bool(body.continue_final_message)
    try:
        ids = vocabulary.tokenizer.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in body.messages],
            add_generation_prompt=not continues and body.add_generation_prompt is not False,
            continue_final_message=continues,
            sanitize_control_tokens=True,
            return_dict=False,
        )
    except Exception as error:  # whatever the checkpoint's template raises
        reason = shorten(next(iter(str(error).splitlines()), type(error).__name__), 200)
        message = f"the model's chat template refuses these messages: {reason}"
        raise Unprocessable(message, param="messages", code="chat_template") from None  # it may quote them
    _check_length(len(ids), "messages", info)
    return tuple(ids)


def _bos(vocabulary: Vocabulary) -> list[int]:
    if vocabulary.tokenizer.bos_token_id is None:
        message = "the prompt is empty and this model has no token that begins a text"
        raise InvalidRequest(message, param="prompt", code="empty_prompt")
    return [vocabulary.tokenizer.bos_token_id]


def _bad_words(texts: Sequence[str], vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Each text at the beginning of a line and behind a space, as vLLM does."""
    found: dict[tuple[int, ...], None] = {}
    for index, text in enumerate(texts):
        word = text.lstrip(" ")
        forms = [tuple(_encode(form, vocabulary)) for form in (word, f" {word}") if form]
        if not any(forms):
            message = f"text {index + 1} of {len(texts)} has no tokens"
            raise InvalidRequest(message, param="bad_words", code="invalid_value")
        found |= dict.fromkeys(form for form in forms if form)
    return tuple(found)


def _encode(text: str, vocabulary: Vocabulary) -> list[int]:
    return vocabulary.tokenizer.encode(text, add_special_tokens=False)


def _check_size(size: int, param: str, vocabulary: Vocabulary, info: ModelInfo) -> None:
    """Before the tokenizer runs, which takes seconds for a text of megabytes."""
    _check_length(-(-size // vocabulary.longest), param, info, "at least ")


def _check_length(length: int, param: str, info: ModelInfo, bound: str = "") -> None:
    if length < info.max_model_len:
        return
    message = (
        f"the prompt has {bound}{length} tokens, but this model's context is {info.max_model_len} tokens "
        "for prompt and answer together"
    )
    raise InvalidRequest(message, param=param, code="context_length_exceeded")
