"""From a job to an HTTP response, for as long as the client listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from gammaray.api import errors, visit
from gammaray.api.answer import Answer
from gammaray.api.chunks import Indexed, chunks
from gammaray.api.client import EngineClient
from gammaray.api.job import Job
from gammaray.api.schema import GenerationBody
from gammaray.api.shape import Shape
from gammaray.api.stream import EventStream, events
from gammaray.api.visit import Visit

T = TypeVar("T")


async def respond(
    request: Request, client: EngineClient, job: Job, body: GenerationBody, shape: Shape
) -> Response:
    """Runs the job until the request's deadline.

    A client that leaves before the first chunk, or before the whole, aborts it.
    """
    seen = visit.of(request.scope)
    answer = seen.answer = Answer(job)
    source = _watched(chunks(client, job), seen)
    if not body.stream:
        await while_connected(request, _collect(source, answer))
        return JSONResponse(shape.answer(answer))
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    stream = events(source, answer, shape, include_usage)
    try:
        return EventStream(await while_connected(request, _first(stream)), stream)
    except BaseException:  # the first event may have come in the moment that the client left
        await stream.aclose()
        raise


async def _watched(source: AsyncGenerator[Indexed, None], seen: Visit) -> AsyncGenerator[Indexed, None]:
    """The chunks, for the record. Raises TimedOut when the next one is not there in time."""
    async with aclosing(source):
        try:
            while (item := await _next(source, seen)) is not None:
                if seen.first_token is None:
                    seen.first_token = asyncio.get_running_loop().time()
                yield item
        except Exception as error:
            seen.error = errors.code(error)
            raise


async def _next(source: AsyncGenerator[Indexed, None], seen: Visit) -> Indexed | None:
    async with seen.in_time():
        return await anext(source, None)


async def _collect(source: AsyncGenerator[Indexed, None], answer: Answer) -> None:
    async with aclosing(source):
        async for index, chunk in source:
            answer.add(index, chunk)


async def _first(stream: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(stream)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, or cancels it and raises ClientDisconnect when the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
