"""Warm-up traffic: an ordinary request's path, and out of the way of real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from gammaray.api.drain import Drain
from gammaray.api.fields import MAX_INT
from gammaray.api.tokens import Vocabulary
from gammaray.api.warmup import AT_ONCE, MAX_TOKENS, Progress, WarmUps
from gammaray.errors import EngineFailure, InvalidRequest, NotFound, Overloaded
from gammaray.types import (
    WARMUP_CLASS,
    Asked,
    Forecast,
    GenerateRequest,
    Health,
    Planned,
    SpeculationPlan,
    TokenChunk,
)

pytestmark = pytest.mark.anyio
ASKS = [[("user", f"hi {i}")] for i in range(5)]


class Planner:
    """Notes what is asked and what is open."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.open_now = 0

    @contextmanager
    def open(self, asked: Asked) -> Iterator[Planned]:
        self.asked.append(asked)
        self.open_now += 1
        yield Planned(SpeculationPlan(asked.wish.drafter or "lookup", 4), "code", Forecast((1.0,), 0.5, 3))
        self.open_now -= 1


class Engine:
    """Of `engine`, but with a load, and without an end while `held`."""

    def __init__(self, inner: Any, planner: Planner) -> None:
        self._inner, self._planner = inner, planner
        self.health_now: Health | Exception = Health("ok", 0.0, 1, 0, 1, 9)
        self.open_now = self.most_open = 0
        self.plans_open = 0
        self.held = False

    async def info(self) -> Any:
        return await self._inner.info()

    async def health(self) -> Health:
        if isinstance(self.health_now, Exception):
            raise self.health_now
        return self.health_now

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        self.plans_open = max(self.plans_open, self._planner.open_now)
        try:
            async for chunk in self._inner.generate(request):
                yield chunk
                while self.held:
                    await asyncio.sleep(0)
        finally:
            self.open_now -= 1


class Rig:
    def __init__(self, engine: Any, tokenizer: Any) -> None:
        self.planner, self.drain, self.inner = Planner(), Drain(), engine
        self.engine = Engine(engine, self.planner)
        self.slept = 0
        self.after_sleep: Any = None
        self.warmups = WarmUps(
            self.engine,
            Vocabulary(tokenizer),
            self.planner,
            self.drain,
            self._sleep,  # type: ignore[arg-type]
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept += 1
        if self.after_sleep:
            self.after_sleep()
        await asyncio.sleep(0)

    async def until(self, done: Any) -> Progress:
        async with asyncio.timeout(20):
            while not done(self.warmups.progress("chat")):
                await asyncio.sleep(0.001)
        return self.warmups.progress("chat")

    async def end(self) -> Progress:
        return await self.until(lambda progress: progress.state != "running")


@pytest.fixture
def rig(engine: Any, tokenizer: Any) -> Rig:
    return Rig(engine, tokenizer)


async def test_all_are_asked_like_any_request_but_tagged_and_last_in_line(rig: Rig) -> None:
    assert rig.warmups.start("chat", ASKS, drafter="other") == Progress("running", 5)
    assert await rig.end() == Progress("done", 5, done=5, tokens=5 * 6)
    requests = rig.inner.requests
    assert sorted(bytes(request.prompt) for request in requests) == [b"uhi %d" % i for i in range(5)]
    for request in requests:
        assert (request.tenant, request.request_class, request.priority) == ("chat", WARMUP_CLASS, MAX_INT)
        assert request.plan.drafter == "other" and request.sampling.max_tokens <= MAX_TOKENS
        assert request.forecast == Forecast(), "nobody learns from it"
    assert {asked.wish.enabled for asked in rig.planner.asked} == {True}
    assert rig.engine.most_open == AT_ONCE
    assert rig.engine.plans_open == 0, "it is no probe that a real request waits for"


async def test_a_model_without_a_template_gets_a_plain_text(rig: Rig, tokenizer: Any) -> None:
    rig.warmups.start("chat", [[("assistant", "I"), ("user", "why")]])  # which this template refuses
    assert (await rig.end()).done == 1
    assert bytes(rig.inner.requests[0].prompt) == b"I\n\nwhy"
    assert rig.planner.asked[0].wish.drafter is None


@pytest.mark.parametrize("busy", [Health("ok", 0.0, 64, 1, 9, 9), Overloaded("none answers")])
async def test_it_waits_while_real_requests_do(rig: Rig, busy: Any) -> None:
    free, rig.engine.health_now = rig.engine.health_now, busy

    def look() -> None:
        assert not rig.inner.requests
        if rig.slept >= 6:
            rig.engine.health_now = free

    rig.after_sleep = look
    rig.warmups.start("chat", ASKS)
    assert (await rig.end()).done == 5 and rig.slept >= 6


async def test_a_failure_is_counted_with_its_reason_and_the_rest_goes_on(rig: Rig) -> None:
    rig.inner.fail_at = {1: EngineFailure("boom")}
    rig.warmups.start("chat", ASKS[:3])
    failed = await rig.end()
    assert (failed.done, failed.failed, failed.reason, failed.tokens) == (0, 3, "boom", 3 * 2)


@pytest.mark.parametrize("running", [True, False])
async def test_a_drain_ends_it(rig: Rig, running: bool) -> None:
    """Those that run are aborted, and none begins."""
    rig.engine.held = running
    if not running:
        rig.engine.health_now = Health("ok", 0.0, 64, 1, 9, 9)
    rig.warmups.start("chat", ASKS)
    await rig.until(lambda progress: progress.tokens if running else rig.slept)
    rig.drain.close()
    rig.engine.held = False
    ended = await rig.end()
    assert ended.state == "cancelled" and ended.done == 0 and rig.engine.open_now == 0
    assert len(rig.inner.requests) == len(rig.inner.aborted) == (AT_ONCE if running else 0)


async def test_cancelling_aborts_what_is_open(rig: Rig) -> None:
    rig.engine.held = True
    rig.warmups.start("chat", ASKS)
    await rig.until(lambda progress: progress.tokens >= 2 * AT_ONCE)
    assert (await rig.warmups.cancel("chat")).state == "cancelled"
    assert len(rig.inner.aborted) == AT_ONCE and rig.engine.open_now == 0
    assert replace(await rig.warmups.cancel("chat"), tokens=0) == Progress("cancelled", 5), (
        "again is no error"
    )


async def test_one_warm_up_a_tenant_at_a_time(rig: Rig) -> None:
    rig.engine.held = True
    rig.warmups.start("chat", ASKS)
    with pytest.raises(InvalidRequest, match="a warm-up of 'chat' is running"):
        rig.warmups.start("chat", ASKS)
    rig.warmups.start("code", ASKS[:1])
    rig.engine.held = False
    await rig.end()
    await asyncio.sleep(0)
    rig.warmups.start("chat", ASKS[:1])
    assert (await rig.end()).done == 1
    with pytest.raises(NotFound, match="no warm-up of 'other' was started"):
        rig.warmups.progress("other")
