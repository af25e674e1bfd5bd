"""One EngineClient over the replicas of a target, each of which has a client of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from gammaray.errors import Overloaded, ReplicaLost
from gammaray.routing.affinity import Affinity
from gammaray.types import GenerateRequest, Health, ModelInfo, TokenChunk

logger = logging.getLogger(__name__)
T = TypeVar("T")

PERIOD_S = 1.0  # between two questions to a replica
LINGER_S = 1.0  # for what any replica can tell, before the next one is asked as well
SILENCE_S = 10.0  # without an answer a replica is lost: its node may be frozen, and will not say so


class Client(Protocol):
    """gammaray.api.client.EngineClient, which this room may not import."""

    async def info(self) -> ModelInfo:
        """Overloaded while the replica does not answer."""
        ...

    async def health(self) -> Health:
        """Overloaded while the replica does not answer."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """ReplicaLost when the replica goes."""
        ...


@dataclass(slots=True, eq=False)
class _Member:
    client: Client
    number: int
    up: bool = True
    open: int = 0  # requests of this process
    waits: set[asyncio.Timeout] = field(default_factory=set)  # of streams that wait for a chunk

    def lose(self) -> None:
        """Its streams end, as nothing else might end them."""
        self.up = False
        for wait in self.waits:
            wait.reschedule(0)


class SpreadClient:
    """Sends each request where its prefix is known or few of ours are, and to none that is known to be lost.

    A subclass of Serve's RequestRouter would have nothing to choose from: it chooses among the replicas of
    one deployment, and here each replica is a deployment of its own (see cluster/app.py).

    A replica is asked every second how it is. One that raises ReplicaLost, or is silent for 10 s, is lost
    until it answers again, and its streams raise ReplicaLost: a resumed request then goes elsewhere.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        silence_s: float = SILENCE_S,
        linger_s: float = LINGER_S,
    ) -> None:
        self._members = [_Member(client, i) for i, client in enumerate(clients)]
        self._affinity = Affinity()
        self._sleep, self._silence_s, self._linger_s = sleep, silence_s, linger_s
        self._watches: list[asyncio.Task[None]] = []

    async def info(self) -> ModelInfo:
        """Of any replica, as they are alike: the next one may have gone without anybody knowing yet."""
        return await first_of([member.client.info for member in self._ranked()], self._linger_s)

    async def health(self) -> Health:
        return await self._ranked()[0].client.health()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        member = self._pick(request)
        member.open += 1
        try:
            async with aclosing(member.client.generate(request)) as stream:
                while (chunk := await self._next(member, stream)) is not None:
                    yield chunk
        except ReplicaLost:
            member.up = False
            raise
        finally:
            member.open -= 1

    async def _next(self, member: _Member, stream: AsyncGenerator[TokenChunk, None]) -> TokenChunk | None:
        wait = asyncio.timeout(None)
        member.waits.add(wait)
        try:
            async with wait:
                return await anext(stream, None)
        except TimeoutError:
            raise ReplicaLost("the model's replica is silent; try again", retry_after=5.0) from None
        finally:
            member.waits.discard(wait)

    def _pick(self, request: GenerateRequest) -> _Member:
        """Any when all are lost: a request may wait there, for one that still starts."""
        ranked = self._ranked()
        load = {member.number: member.open for member in ranked if member.up}
        if not load:
            return ranked[0]
        return self._members[self._affinity.send(request.tenant, request.prompt, load)]

    def _ranked(self) -> list[_Member]:
        if not self._watches:  # here, as the constructor has no event loop
            self._watches = [asyncio.create_task(self._watch(member)) for member in self._members]
        return sorted(self._members, key=lambda member: (not member.up, member.open, member.number))

    async def _watch(self, member: _Member) -> None:
        while True:
            await self._sleep(PERIOD_S)
            answers = await self._answers(member)
            if answers != member.up:
                logger.warning("replica %d is %s", member.number, "back" if answers else "lost")
            if answers:
                member.up = True
            else:
                member.lose()

    async def _answers(self, member: _Member) -> bool:
        try:
            async with asyncio.timeout(self._silence_s):
                await member.client.info()
        except (Overloaded, TimeoutError):
            return False
        except Exception:  # it answers, which is all that is asked here
            logger.warning("replica %d", member.number, exc_info=True)
        return True


async def first_of(calls: Sequence[Callable[[], Coroutine[Any, Any, T]]], linger_s: float) -> T:
    """The first answer. The next call begins when one has failed, or when there was none for `linger_s`.

    Raises what an answer raises; Overloaded only when all calls do.
    """
    waiting, pending = list(calls), set[asyncio.Task[T]]()
    try:
        while True:
            if waiting:
                pending.add(asyncio.create_task(waiting.pop(0)()))
            limit = linger_s if waiting else None
            done, pending = await asyncio.wait(pending, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            answers = [task for task in done if not isinstance(task.exception(), Overloaded)]
            if answers or not (waiting or pending):
                return (answers or [*done])[0].result()
    finally:
        for task in pending:
            task.cancel()
