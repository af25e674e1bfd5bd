"""Log-probabilities in OpenAI's two forms: `content` of chats, and the four lists of completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gammaray.api.tokens import TextPosition, Token, Vocabulary
from gammaray.types import Logprobs

LEAST = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class Entry:
    """One token. `logprob` and `top` are None where nothing comes before the token to predict it."""

    token: Token
    offset: int  # characters of the choice's text before it
    logprob: float | None
    top: tuple[tuple[Token, float], ...] | None  # most probable first


def generated(
    ids: Sequence[int], logprobs: Sequence[Logprobs], position: TextPosition, vocabulary: Vocabulary
) -> tuple[Entry, ...]:
    """Entries of the tokens of one chunk; moves `position` behind them."""
    return tuple(
        _entry(vocabulary.token(index), found, position, vocabulary)
        for index, found in zip(ids, logprobs, strict=True)
    )


def of_prompt(
    ids: Sequence[int], logprobs: Sequence[Logprobs | None], text: str, vocabulary: Vocabulary
) -> tuple[Entry, ...]:
    """Entries of an echoed prompt.

    Tokens and `text` are aligned at their ends: a tokenizer may begin with a special token or a space that
    the text does not have.
    """
    tokens, length = [vocabulary.token(index) for index in ids], TextPosition(names=True)
    for token in tokens:
        length.step(token)
    position = TextPosition(len(text) - length.characters, names=True)
    return tuple(
        _entry(token, found, position, vocabulary) for token, found in zip(tokens, logprobs, strict=True)
    )


def _entry(token: Token, found: Logprobs | None, position: TextPosition, vocabulary: Vocabulary) -> Entry:
    offset = max(0, position.step(token))
    if found is None:
        return Entry(token, offset, None, None)
    top = tuple((vocabulary.token(index), _finite(value)) for index, value in found.top)
    return Entry(token, offset, _finite(found.logprob), top)


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST  # NaN is not greater either


def chat(entries: Iterable[Entry]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    content = [
        {**_spelt(e.token, e.logprob), "top_logprobs": [_spelt(token, value) for token, value in e.top or ()]}
        for e in entries
    ]
    return {"content": content, "refusal": None}


def _spelt(token: Token, logprob: float | None) -> dict[str, Any]:
    return {"token": token.text, "logprob": logprob, "bytes": list(token.raw)}


def completion(entries: Sequence[Entry]) -> dict[str, Any]:
    """`choices[].logprobs` of a completion."""
    return {
        "tokens": [e.token.text for e in entries],
        "token_logprobs": [e.logprob for e in entries],
        "top_logprobs": [_by_text(e) for e in entries],
        "text_offset": [e.offset for e in entries],
    }


def _by_text(entry: Entry) -> dict[str, float] | None:
    """The best tokens and the one that is there; of two with one text the better stays."""
    if entry.top is None or entry.logprob is None:
        return None
    best: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
        best.setdefault(token.text, logprob)
    return best
