"""The token chunks of all prompts of one HTTP request, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gammaray.api.client import EngineClient
from gammaray.api.job import Job
from gammaray.errors import EngineFailure
from gammaray.types import GenerateRequest, TokenChunk

Indexed = tuple[int, TokenChunk]  # index of the choice


async def chunks(client: EngineClient, job: Job) -> AsyncGenerator[Indexed, None]:
    """(choice, chunk) of every prompt. Closing it, or a failure of one prompt, aborts all of them."""
    queue: asyncio.Queue[Indexed | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(client, job, index, queue)) for index in range(len(job.requests))]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    client: EngineClient, job: Job, prompt: int, queue: asyncio.Queue[Indexed | Exception | None]
) -> None:
    try:
        async with aclosing(client.generate(job.requests[prompt])) as stream:
            async for chunk in _prompt_first(stream, job.requests[prompt]):
                queue.put_nowait((prompt * job.n + chunk.sequence, _checked(chunk)))
    except Exception as error:
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)


async def _prompt_first(
    stream: AsyncGenerator[TokenChunk, None], request: GenerateRequest
) -> AsyncGenerator[TokenChunk, None]:
    """The same chunks; those of other choices wait for the one with the prompt's log-probabilities."""
    waiting: list[TokenChunk] = []
    ready = request.sampling.prompt_logprobs is None
    async for chunk in stream:
        ready = ready or chunk.sequence == 0
        waiting.append(chunk)
        if ready:
            for each in sorted(waiting, key=lambda chunk: chunk.sequence):
                yield each
            waiting = []


def _checked(chunk: TokenChunk) -> TokenChunk:
    if chunk.finish == "error":
        raise EngineFailure(chunk.error or "the engine failed on this request")
    if chunk.finish == "abort":
        raise EngineFailure("the server stopped this request before it was done", code="aborted")
    return chunk
