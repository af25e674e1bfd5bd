"""Server-sent events: one per engine chunk, the first of them awaited before the status is sent."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gammaray.api import errors
from gammaray.api.answer import Answer
from gammaray.api.chunks import Indexed
from gammaray.api.shape import Shape
from gammaray.errors import GammarayError

DONE = b"data: [DONE]\n\n"
LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


def event(data: dict[str, Any]) -> bytes:
    """One event, its data on one line: JSON escapes the line ends of SSE, and we those that other readers
    of lines know."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(LINE_ENDS)
    return b"data: " + text.encode() + b"\n\n"


async def events(
    chunks: AsyncGenerator[Indexed, None], answer: Answer, shape: Shape, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The whole stream as events; one of them has the metrics. Failures of the engine are raised, at the
    chunk where they happen."""
    head = shape.head(answer.job, stream=True) | ({"usage": None} if include_usage else {})
    opened: set[int] = set()
    async with aclosing(chunks):
        async for index, chunk in chunks:
            piece = answer.add(index, chunk)
            if index not in opened and shape.opening is not None:
                yield event({**head, "choices": [shape.opening(index)]})
            opened.add(index)
            last = {"metrics": answer.metrics()} if answer.finished and not include_usage else {}
            yield event({**head, "choices": [shape.delta(index, piece)], **last})
    if include_usage:
        yield event({**head, "choices": [], "usage": answer.usage(), "metrics": answer.metrics()})
    yield DONE


class EventStream(StreamingResponse):
    """Sends `first`, then `rest`. A failure becomes a last event; a client that leaves closes `rest`."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(_until_failure(first, rest), headers={"Cache-Control": "no-cache"})
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Only closing it here is certain: the body may never have been started, or be left half-way.
        async with aclosing(self._rest):
            await super().__call__(scope, receive, send)


async def _until_failure(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    try:
        async for item in rest:
            yield item
    except GammarayError as error:
        yield event(errors.body(error))
    except Exception as error:
        yield event(errors.body(errors.hide(error)))
