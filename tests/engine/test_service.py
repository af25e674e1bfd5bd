"""The async shell: streams, aborts, failures and the thread behind them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from support.tape import Letters, TapeRunner

from gammaray.engine.engine import TOKEN_BUDGET, Engine, EngineOptions
from gammaray.engine.service import STEP_LIMIT_S, AsyncEngine, step_limit
from gammaray.errors import EngineFailure, InvalidRequest, ReplicaLost
from gammaray.types import GenerateRequest, Health, SamplingParams, StepReport


def request(rid: str = "r", n: int = 1, max_tokens: int = 20) -> GenerateRequest:
    return GenerateRequest(rid, (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=max_tokens), n=n)


@pytest.fixture
def reports() -> list[StepReport]:
    return []


@pytest.fixture
def service(reports: list[StepReport]) -> AsyncEngine:
    engine = Engine(TapeRunner(max_model_len=2000, blocks=600), Letters(), options=EngineOptions())
    shell = AsyncEngine(engine, reports.append)
    yield shell
    shell.shutdown()


async def collect(stream: AsyncIterator[object]) -> list[object]:
    return [chunk async for chunk in stream]


def test_streams_run_together_and_each_gets_its_own_chunks(service: AsyncEngine) -> None:
    async def both() -> list[list[object]]:
        return await asyncio.gather(*(collect(service.generate(request(rid, n=2))) for rid in "ab"))

    for rid, chunks in zip("ab", asyncio.run(both()), strict=True):
        assert {chunk.request_id for chunk in chunks} == {rid}
        assert sorted(chunk.sequence for chunk in chunks if chunk.finish) == [0, 1]


def test_closing_a_stream_aborts_the_request(service: AsyncEngine, reports: list[StepReport]) -> None:
    async def leave_early() -> None:
        stream = service.generate(request(max_tokens=1900))
        await anext(stream)
        await stream.aclose()
        await collect(service.generate(request("next", max_tokens=1)))

    asyncio.run(leave_early())
    service.shutdown()  # the last report follows the last chunk
    assert reports[-1].running == 0
    assert reports[-1].kv_used_blocks == 0


def test_a_bad_request_is_raised_before_the_first_chunk(service: AsyncEngine) -> None:
    bad = GenerateRequest("r", ())
    with pytest.raises(InvalidRequest, match="empty"):
        asyncio.run(collect(service.generate(bad)))


def test_an_id_may_be_used_again_at_once(service: AsyncEngine) -> None:
    """The abort of the first must not reach the second."""

    async def again() -> list[list[object]]:
        found = []
        for _ in range(10):
            first = service.generate(request(max_tokens=1900))
            await anext(first)
            await first.aclose()
            found.append(await collect(service.generate(request(max_tokens=3))))
        return found

    for chunks in asyncio.run(again()):
        assert sum(len(chunk.ids) for chunk in chunks) == 3
        assert chunks[-1].finish == "length"
        assert {chunk.request_id for chunk in chunks} == {"r"}


def test_a_step_that_raises_fails_its_requests_and_the_next_one_works(service: AsyncEngine) -> None:
    runner = service._engine.runner
    forward = runner.forward

    def fail_once(rows: object) -> object:
        runner.forward = forward  # type: ignore[method-assign]
        raise RuntimeError("no")

    runner.forward = fail_once  # type: ignore[method-assign]
    with pytest.raises(EngineFailure, match="RuntimeError"):
        asyncio.run(collect(service.generate(request())))
    assert asyncio.run(collect(service.generate(request())))
    service.check_health()


def test_a_commit_that_raises_leaves_nobody_waiting(service: AsyncEngine) -> None:
    """The first sequence of the step had finished already: its last chunk must still arrive."""
    engine = service._engine
    advance, calls = engine._advance_draft, []

    def fail(part: object, done: object, kept: int) -> None:
        calls.append(part)
        raise RuntimeError("no")

    engine._advance_draft = fail  # type: ignore[method-assign]

    async def both() -> list[object]:
        streams = [service.generate(request(rid, max_tokens=n)) for rid, n in (("short", 1), ("long", 9))]
        return await asyncio.wait_for(
            asyncio.gather(*map(collect, streams), return_exceptions=True), timeout=20
        )

    asyncio.run(both())
    engine._advance_draft = advance  # type: ignore[method-assign]
    assert calls
    assert asyncio.run(collect(service.generate(request())))


def test_a_listener_that_raises_stops_nothing(service: AsyncEngine) -> None:
    def fail(report: StepReport) -> None:
        raise RuntimeError("no")

    service._listener = fail
    assert asyncio.run(collect(service.generate(request())))


def test_a_reader_whose_loop_is_gone_stops_nobody_else(service: AsyncEngine) -> None:
    loop = asyncio.new_event_loop()
    lost = service.generate(request("lost", max_tokens=1900))
    loop.run_until_complete(anext(lost))
    loop.close()
    assert asyncio.run(collect(service.generate(request())))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_thread_dies_every_reader_is_told(service: AsyncEngine) -> None:
    def die(message: str) -> None:
        raise RuntimeError("dead")

    service._engine.fail_all = die  # type: ignore[method-assign]
    service._engine.scheduler.schedule = die  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(ReplicaLost, match="the engine has failed"):
            asyncio.run(collect(service.generate(request())))
    service._thread.join()
    assert service.health().state == "stopped"
    with pytest.raises(EngineFailure, match="stopped"):
        service.check_health()


def test_shutting_down_ends_open_streams_and_health(service: AsyncEngine) -> None:
    async def interrupted() -> None:
        stream = service.generate(request(max_tokens=1900))
        await anext(stream)
        service.shutdown()
        with pytest.raises(ReplicaLost, match="shutting down"):
            await collect(stream)

    asyncio.run(interrupted())
    with pytest.raises(EngineFailure, match="stopped"):
        service.check_health()


class Stuck:
    """A service whose engine's next step waits for `go`, and the time, which stands still."""

    def __init__(self, service: AsyncEngine) -> None:
        self.now, self.go, self.inside = 100.0, threading.Event(), threading.Event()
        service._clock, service._step_ended = (lambda: self.now), self.now
        forward = service._engine.runner.forward

        def wait(rows: object) -> object:
            self.inside.set()
            self.go.wait()
            return forward(rows)

        service._engine.runner.forward = wait  # type: ignore[method-assign]


@pytest.fixture
def stuck(service: AsyncEngine) -> Iterator[Stuck]:
    state = Stuck(service)
    yield state
    state.go.set()


def test_a_step_that_does_not_end_is_noticed_and_its_streams_may_go_on_elsewhere(
    service: AsyncEngine, stuck: Stuck
) -> None:
    async def read() -> None:
        reader = asyncio.create_task(collect(service.generate(request())))
        await asyncio.to_thread(stuck.inside.wait)
        stuck.now += STEP_LIMIT_S - 1
        service.check_health()
        assert service.health().state == "ok"
        stuck.now += 1
        assert service.health().state == "stuck"
        assert service.health().since_step_s == STEP_LIMIT_S
        assert not reader.done()
        for _ in range(2):
            with pytest.raises(EngineFailure, match="has not ended for 120 s"):
                service.check_health()
        with pytest.raises(ReplicaLost, match="stuck"):
            await reader
        with pytest.raises(ReplicaLost, match="stuck"):
            await collect(service.generate(request()))

    asyncio.run(read())
    stuck.go.set()  # it was only slow: too late
    service._thread.join()
    assert service.health().state == "stopped"
    with pytest.raises(ReplicaLost, match="stuck"):
        asyncio.run(collect(service.generate(request())))


def test_an_idle_engine_is_never_stuck(service: AsyncEngine, stuck: Stuck) -> None:
    stuck.now += 1e6
    service.check_health()
    assert service.health() == Health("ok", 1e6, 0, 0, 0, 600)
    stuck.go.set()
    asyncio.run(collect(service.generate(request(max_tokens=5))))
    while service._step_began is not None:  # the last chunk comes before the step's end
        time.sleep(0)
    assert service.health().since_step_s == 0
    stuck.now += 1e6
    service.check_health()


def test_a_large_token_budget_may_take_longer() -> None:
    assert step_limit(1) == step_limit(TOKEN_BUDGET) == STEP_LIMIT_S
    assert step_limit(4 * TOKEN_BUDGET) == 4 * STEP_LIMIT_S


def test_shutting_down_leaves_a_stuck_step_behind(service: AsyncEngine, stuck: Stuck) -> None:
    async def read() -> None:
        reader = asyncio.create_task(collect(service.generate(request())))
        await asyncio.to_thread(stuck.inside.wait)
        service.shutdown(timeout_s=0.01)
        with pytest.raises(ReplicaLost, match="shutting down"):
            await reader

    asyncio.run(read())
    assert service._thread.is_alive()


def test_health_tells_what_the_last_step_left(service: AsyncEngine) -> None:
    async def read() -> Health:
        stream = service.generate(request(max_tokens=1900, n=2))
        for _ in range(10):
            await anext(stream)
        health = service.health()
        await stream.aclose()
        return health

    health = asyncio.run(read())
    assert health.running == 2
    assert 0 < health.kv_used_blocks < health.kv_total_blocks == 600
