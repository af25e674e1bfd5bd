"""How the two routes differ in the JSON of their answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gammaray.api.answer import Answer
from gammaray.api.job import Job

Choice = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """`whole` and `delta` make a choice from (index, text, finish_reason); `opening` begins a stream."""

    object: str
    stream_object: str
    whole: Callable[[int, str, str | None], Choice]
    delta: Callable[[int, str, str | None], Choice]
    opening: Callable[[int], Choice] | None

    def head(self, job: Job, stream: bool) -> dict[str, Any]:
        name = self.stream_object if stream else self.object
        return {"id": job.id, "object": name, "created": job.created, "model": job.model}

    def answer(self, answer: Answer) -> dict[str, Any]:
        """The whole response."""
        choices = [self.whole(i, "".join(c.text), c.finish) for i, c in enumerate(answer.choices)]
        head = self.head(answer.job, stream=False)
        return {**head, "choices": choices, "usage": answer.usage(), "metrics": answer.metrics()}


def _text(index: int, text: str, finish: str | None) -> Choice:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def _message(index: int, text: str, finish: str | None) -> Choice:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}


def _delta(index: int, text: str, finish: str | None) -> Choice:
    return {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}


def _role(index: int) -> Choice:
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


COMPLETION = Shape("text_completion", "text_completion", whole=_text, delta=_text, opening=None)
CHAT = Shape("chat.completion", "chat.completion.chunk", whole=_message, delta=_delta, opening=_role)
