"""Requests over several replicas, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from gammaray.actors.spread import PERIOD_S, SpreadClient
from gammaray.api.resume import Patience, ResumingClient
from gammaray.errors import InvalidRequest, ReplicaLost
from gammaray.types import GenerateRequest, Health, ModelInfo, SamplingParams, TokenChunk

WORDS = 6
REQUEST = GenerateRequest("r", (1,), SamplingParams(max_tokens=WORDS))


class Replica:
    """Says position after position. `broken`: calls raise; `frozen`: nothing ever answers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.open = 0
        self.served: list[str] = []
        self.broken: Exception | None = None
        self.frozen = False
        self.pace: Callable[[int], Coroutine[Any, Any, None]] | None = None

    async def _answer(self) -> None:
        if self.frozen:
            await asyncio.Event().wait()
        if self.broken:
            raise self.broken

    async def info(self) -> ModelInfo:
        await self._answer()
        return ModelInfo(self.name, 10, 10, "float32", "cpu", ())

    async def health(self) -> Health:
        await self._answer()
        return Health("ok", 0.0, self.open, 0, 0, 0)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.served.append(request.request_id)
        self.open += 1
        try:
            for position in range(len(request.generated[0]) if request.generated else 0, WORDS):
                if self.pace:
                    await self.pace(position)
                await self._answer()
                finish = "length" if position == WORDS - 1 else None
                yield TokenChunk(request.request_id, 0, position, (position,), f"{position} ", finish)
        finally:
            self.open -= 1


class Clock:
    """Sleeps end when `pass_` lets them."""

    def __init__(self) -> None:
        self._round = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        assert seconds == PERIOD_S
        await self._round.wait()

    async def pass_(self) -> None:
        """One period, and the answers to what is asked after it."""
        await asyncio.sleep(0)  # who just began to sleep
        over, self._round = self._round, asyncio.Event()
        over.set()
        await asyncio.sleep(0.05)


def spread(silence_s: float = 0.02) -> tuple[SpreadClient, Clock, list[Replica]]:
    clock, replicas = Clock(), [Replica("a"), Replica("b"), Replica("c")]
    return SpreadClient(replicas, clock.sleep, silence_s, linger_s=0.01), clock, replicas


async def whole(client: SpreadClient | ResumingClient) -> str:
    return "".join([chunk.text async for chunk in client.generate(REQUEST)])


TEXT = "".join(f"{i} " for i in range(WORDS))


def test_the_replica_with_the_fewest_requests_is_next() -> None:
    async def run() -> None:
        client, _, (a, b, c) = spread()
        streams = [client.generate(REQUEST) for _ in range(5)]
        for stream in streams:
            await anext(stream)
        assert [a.open, b.open, c.open] == [2, 2, 1]
        await streams[1].aclose()  # on b
        await streams[4].aclose()  # on b
        assert await whole(client) == TEXT
        assert [a.open, b.open, c.open] == [2, 0, 1]
        assert len(b.served) == 3

    asyncio.run(run())


def test_a_lost_replica_gets_nothing_until_it_answers_again() -> None:
    async def run() -> None:
        client, clock, (a, b, _) = spread()
        a.broken = ReplicaLost("gone")
        with pytest.raises(ReplicaLost):
            await whole(client)
        for _ in range(3):
            assert await whole(client) == TEXT
        assert len(a.served) == 1
        await clock.pass_()
        assert await whole(client) == TEXT
        assert len(a.served) == 1  # it still says that it is gone
        a.broken = None
        await clock.pass_()
        assert await whole(client) == TEXT
        assert len(a.served) == 2
        assert len(b.served) == 4

    asyncio.run(run())


def test_a_loss_that_no_request_saw_is_seen_by_the_watch() -> None:
    async def run() -> None:
        client, clock, (a, b, c) = spread()
        assert (await client.info()).name == "a"
        a.broken, b.frozen = ReplicaLost("gone"), True
        await clock.pass_()
        assert (await client.info()).name == "c"
        assert (await client.health()).state == "ok"
        assert await whole(client) == TEXT
        assert len(c.served) == 1

    asyncio.run(run())


@pytest.mark.parametrize("broken", [None, ReplicaLost("gone")])
def test_what_any_replica_can_tell_is_told_while_one_is_away(broken: Exception | None) -> None:
    async def run() -> None:
        client, _, (a, b, c) = spread()
        a.broken, a.frozen = broken, broken is None
        async with asyncio.timeout(5):
            assert (await client.info()).name == "b"  # before anybody has noticed the loss of a
        b.broken = c.broken = ReplicaLost("gone")
        asked = asyncio.create_task(client.info())
        await asyncio.sleep(0.05)
        if a.frozen:
            assert not asked.done()  # a may still answer
            asked.cancel()
        else:
            with pytest.raises(ReplicaLost):
                await asked
        b.broken = InvalidRequest("no")  # is an answer
        with pytest.raises(InvalidRequest):
            await client.info()

    asyncio.run(run())


def test_a_replica_that_freezes_ends_its_streams_and_no_others() -> None:
    async def run() -> None:
        client, clock, (a, _, _) = spread()
        frozen, other = client.generate(REQUEST), client.generate(REQUEST)
        await anext(frozen)
        await anext(other)
        a.frozen = True
        waiting = asyncio.create_task(anext(frozen))
        await clock.pass_()
        with pytest.raises(ReplicaLost, match="silent"):
            await waiting
        assert a.open == 0
        assert [chunk.first_position async for chunk in other] == [*range(1, WORDS)]

    asyncio.run(run())


def test_a_resumed_request_goes_on_elsewhere() -> None:
    async def run() -> None:
        client, _, (a, b, _) = spread()

        async def die(position: int) -> None:
            if position == 3:
                a.broken = ReplicaLost("killed")

        a.pace = die
        assert await whole(ResumingClient(client, Patience(first_s=0.001))) == TEXT
        assert (len(a.served), len(b.served)) == (1, 1)

    asyncio.run(run())


def test_an_error_of_the_request_is_no_loss() -> None:
    async def run() -> None:
        client, clock, (a, _, _) = spread()
        a.broken = InvalidRequest("no")
        for _ in range(2):
            with pytest.raises(InvalidRequest):
                await whole(client)
            await clock.pass_()
        assert len(a.served) == 2

    asyncio.run(run())


def test_when_all_are_lost_a_request_waits_at_one() -> None:
    async def run() -> None:
        client, _, replicas = spread()
        for replica in replicas:
            replica.broken = ReplicaLost("gone")
        for _ in replicas:
            with pytest.raises(ReplicaLost):
                await whole(client)
        replicas[0].broken = None
        assert await whole(client) == TEXT

    asyncio.run(run())


def test_a_prefix_goes_where_it_was_before() -> None:
    async def run() -> None:
        client, clock, (a, b, c) = spread()
        long = replace(REQUEST, prompt=(7,) * 100)
        stream = client.generate(REQUEST)
        await anext(stream)  # on a
        assert [chunk.first_position async for chunk in client.generate(long)] == [*range(WORDS)]
        await stream.aclose()
        for _ in range(3):  # a is the idlest too
            assert [chunk.first_position async for chunk in client.generate(long)] == [*range(WORDS)]
        assert [len(replica.served) for replica in (a, b, c)] == [1, 4, 0]
        b.frozen = True
        await clock.pass_()
        assert [chunk.first_position async for chunk in client.generate(long)] == [*range(WORDS)]
        assert [len(replica.served) for replica in (a, b, c)] == [2, 4, 0]

    asyncio.run(run())


def test_a_replica_that_is_too_busy_shares_its_prefix() -> None:
    async def run() -> None:
        client, _, replicas = spread()
        streams = [client.generate(replace(REQUEST, prompt=(7,) * 100)) for _ in range(9)]
        for stream in streams:
            await anext(stream)
        assert [replica.open for replica in replicas] == [5, 4, 0]
        for stream in streams:
            await stream.aclose()

    asyncio.run(run())
