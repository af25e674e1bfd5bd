"""How the two routes differ in the JSON of their answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gammaray.api import logprobs
from gammaray.api.answer import Answer, Piece, joined
from gammaray.api.job import Job

Choice = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """`whole` and `delta` make a choice from its index and a piece of it; `opening` begins a stream."""

    object: str
    stream_object: str
    whole: Callable[[int, Piece], Choice]
    delta: Callable[[int, Piece], Choice]
    opening: Callable[[int], Choice] | None

    def head(self, job: Job, stream: bool) -> dict[str, Any]:
        name = self.stream_object if stream else self.object
        return {"id": job.id, "object": name, "created": job.created, "model": job.model}

    def answer(self, answer: Answer) -> dict[str, Any]:
        """The whole response."""
        choices = [self.whole(i, joined(choice.pieces)) for i, choice in enumerate(answer.choices)]
        head = self.head(answer.job, stream=False)
        return {**head, "choices": choices, "usage": answer.usage(), "metrics": answer.metrics()}


def _text(index: int, piece: Piece) -> Choice:
    entries = None if piece.entries is None else logprobs.completion(piece.entries)
    return {"index": index, "text": piece.text, "logprobs": entries, "finish_reason": piece.finish}


def _message(index: int, piece: Piece) -> Choice:
    return _turn(index, piece, {"message": {"role": "assistant", "content": piece.text, "refusal": None}})


def _delta(index: int, piece: Piece) -> Choice:
    return _turn(index, piece, {"delta": {"content": piece.text}})


def _turn(index: int, piece: Piece, turn: dict[str, Any]) -> Choice:
    entries = None if piece.entries is None else logprobs.chat(piece.entries)
    return {"index": index, **turn, "logprobs": entries, "finish_reason": piece.finish}


def _role(index: int) -> Choice:
    return _turn(index, Piece("", None, None), {"delta": {"role": "assistant", "content": ""}})


COMPLETION = Shape("text_completion", "text_completion", whole=_text, delta=_text, opening=None)
CHAT = Shape("chat.completion", "chat.completion.chunk", whole=_message, delta=_delta, opening=_role)
