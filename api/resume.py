"""One unbroken stream over replicas that come and go.

A replica that dies takes its streams with it. The tokens of a request depend on its seed and their positions
alone, so another replica goes on where the first one was, given the ids that the reader has already.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from gammaray.api.client import EngineClient
from gammaray.errors import EngineFailure, Overloaded, ReplicaLost
from gammaray.types import GenerateRequest, Health, ModelInfo, TokenChunk

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """When a request is given up."""

    wait_s: float = 60.0  # without a chunk, from a loss on; a replica takes 10 to 20 s to come back
    losses: int = 8  # of one request
    fruitless: int = 2  # resumed runs in a row without a chunk: this request may be what kills replicas
    first_s: float = 0.05  # before the first look for a replica; doubles
    longest_s: float = 1.0
    suspect_s: float = 1.0  # more, and up to twice that, after a run without a chunk


class ResumingClient:
    """An EngineClient that takes a request up again when `inner` raises ReplicaLost for it.

    Sampling, `n`, log-probabilities and finish reasons are those of an undisturbed run. Counts of a run that
    was lost go with it, as they come with a sequence's last chunk: `stats` covers the run that ended it.
    `clock` in seconds, `draw` in [0, 1).
    """

    def __init__(
        self,
        inner: EngineClient,
        patience: Patience = Patience(),
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._inner, self._patience = inner, patience
        self._sleep, self._clock, self._draw = sleep, clock, draw

    async def info(self) -> ModelInfo:
        return await self._inner.info()

    async def health(self) -> Health:
        return await self._inner.health()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Raises ReplicaLost when patience is over, EngineFailure when a resumed run says something else."""
        told, losses = _Told(request), _Losses(self._patience)
        while not told.complete:
            try:
                async with aclosing(self._inner.generate(told.rest())) as stream:
                    async for chunk in stream:
                        if (new := told.take(chunk)) is not None:
                            losses.progress()
                            yield new
                        if told.complete and losses.total:  # what else comes repeats finished sequences
                            break
                    if not told.complete:
                        raise ReplicaLost("the model's replica ended a stream before its last token")
            except Overloaded as error:
                # A replica that just came back may have no room for all that others lost.
                if not (isinstance(error, ReplicaLost) or losses.total):
                    raise
                if not told.complete:
                    losses.add(error, self._clock())
                    logger.warning("request %s: %s; resuming", request.request_id, error.message)
                    await self._until_back(losses)

    async def _until_back(self, losses: _Losses) -> None:
        """Until a replica answers. Requests that may be what killed it let the others get ahead."""
        answered = False
        while not answered:
            await self._sleep(losses.pause() * (0.5 + self._draw()))
            answered = await self._answers(losses)
        if losses.suspect:
            await self._sleep(self._patience.suspect_s * (1 + self._draw()))

    async def _answers(self, losses: _Losses) -> bool:
        try:
            async with asyncio.timeout(losses.left(self._clock())):  # Ray may wait for a replica, without end
                await self._inner.info()
            return True
        except Overloaded as error:
            losses.wait(error, self._clock())
        except TimeoutError:
            raise losses.last from None
        return False


@dataclass(slots=True)
class _Losses:
    """Of one request; decides when it is enough. Times in seconds."""

    patience: Patience
    total: int = 0
    suspect: bool = False  # the run that was lost gave no chunk
    last: Overloaded = field(default_factory=lambda: ReplicaLost("the model's replica is gone"))
    _chunk: bool = False  # in this run
    _fruitless: int = 0
    _pauses: int = 0
    _since: float | None = None  # the first loss after a chunk

    def progress(self) -> None:
        self._chunk, self._since = True, None
        self._fruitless = self._pauses = 0

    def add(self, error: Overloaded, now: float) -> None:
        """A run has ended early. Raises `error` when it must be the last one."""
        self.suspect, self._chunk = not self._chunk, False
        if isinstance(error, ReplicaLost):
            self._fruitless += self.suspect and self.total > 0
            self.total += 1
        if self._fruitless >= self.patience.fruitless or self.total > self.patience.losses:
            raise error
        self.wait(error, now)

    def wait(self, error: Overloaded, now: float) -> None:
        """No replica yet. Raises `error` when the time is over."""
        self.last = error
        if self.left(now) <= 0:
            raise error

    def left(self, now: float) -> float:
        self._since = now if self._since is None else self._since
        return self._since + self.patience.wait_s - now

    def pause(self) -> float:
        self._pauses += 1
        return min(self.patience.longest_s, self.patience.first_s * 2.0 ** (self._pauses - 1))


class _Told:
    """What of each sequence has reached the reader."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._sequences = [_Sequence(list(ids)) for ids in request.generated or ((),) * request.n]
        self._prompt_told = request.sampling.prompt_logprobs is None

    @property
    def complete(self) -> bool:
        return all(sequence.finished for sequence in self._sequences)

    def rest(self) -> GenerateRequest:
        """The request for what is missing."""
        sampling = self._request.sampling
        return replace(
            self._request,
            sampling=replace(sampling, prompt_logprobs=None) if self._prompt_told else sampling,
            generated=tuple(tuple(sequence.ids) for sequence in self._sequences),
        )

    def take(self, chunk: TokenChunk) -> TokenChunk | None:
        """What of `chunk` is new. Raises EngineFailure when it does not continue what was told."""
        sequence = self._sequences[chunk.sequence]
        if sequence.finished:
            return None
        new = sequence.take(chunk)
        if chunk.prompt_logprobs:
            new = replace(new, prompt_logprobs=() if self._prompt_told else chunk.prompt_logprobs)
            self._prompt_told = True
        if new.cached_tokens > len(self._request.prompt):  # to a resumed run, generated tokens are prompt
            new = replace(new, cached_tokens=len(self._request.prompt))
        return new if new.ids or new.finish or new.prompt_logprobs else None


@dataclass(slots=True)
class _Sequence:
    ids: list[int]
    finished: bool = False
    _length: int = 0  # of the text told
    _starts: dict[int, int] = field(default_factory=dict)  # position of a chunk -> where its text began

    def take(self, chunk: TokenChunk) -> TokenChunk:
        """`chunk` without the ids that are known, which must be the same, and without their text."""
        first = chunk.first_position
        known = self.ids[first : first + len(chunk.ids)]
        if first > len(self.ids) or chunk.ids[: len(known)] != tuple(known):
            raise EngineFailure("a resumed stream does not continue what was said before")
        new = replace(
            chunk,
            first_position=first + len(known),
            ids=chunk.ids[len(known) :],
            text=self._new_text(chunk, len(known)),
            logprobs=chunk.logprobs[len(known) :],
        )
        self._starts[len(self.ids)] = self._length
        self.ids += new.ids
        self._length += len(new.text)
        self.finished = new.finish is not None
        return new

    def _new_text(self, chunk: TokenChunk, known: int) -> str:
        """The text of a chunk is that of exactly its ids, so what was told since it began is not new."""
        if known == len(chunk.ids):
            return "" if known else chunk.text
        if known and chunk.first_position not in self._starts:
            raise EngineFailure("a resumed stream repeats tokens from within a chunk")
        return chunk.text[self._length - self._starts[chunk.first_position] :] if known else chunk.text
