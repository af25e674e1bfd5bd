"""Streams over replicas that die: what the reader sees is what one undisturbed replica would have said."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.api.resume import Patience, ResumingClient
from gammaray.errors import EngineFailure, InvalidRequest, Overloaded, ReplicaLost
from gammaray.types import (
    GenerateRequest,
    Logprobs,
    ModelInfo,
    SamplingParams,
    SpeculationStats,
    TokenChunk,
)

PROMPT = (5, 6, 7)
INFO = ModelInfo("tiny", 256, 64, "float32", "cpu", ())
LOST = ReplicaLost("gone")
PATIENT = Patience()


@dataclass
class Clock:
    """Time passes only by sleeping."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Script:
    """One run of a replica: how it cuts its chunks, and what it does after so many of them."""

    sizes: list[int] = field(default_factory=lambda: [1])
    error: Exception | None = None
    after: int = 0  # chunks before the error
    back: int = 0  # chunks of the reader's that are said again
    twice: bool = False  # each chunk comes twice


class Replica:
    """Says token `token(sequence, position)` at each position, `lengths[k]` of them in sequence k."""

    def __init__(self, lengths: list[int], scripts: list[Script], clock: Clock | None = None) -> None:
        self.lengths, self.scripts = lengths, scripts
        self.clock = clock or Clock()
        self.requests: list[GenerateRequest] = []
        self.closed = 0
        self.down_until = 0.0  # info() raises until then
        self.borders: dict[int, list[int]] = {k: [0] for k in range(len(lengths))}

    async def info(self) -> ModelInfo:
        if self.clock.now < self.down_until:
            raise LOST
        return INFO

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        self.requests.append(request)
        told = 0
        try:
            for chunk in self._chunks(request, script):
                if told == script.after and script.error:
                    raise script.error
                told += 1
                for _ in range(1 + script.twice):
                    yield chunk
            if script.error:
                raise script.error
        except GeneratorExit:
            self.closed += 1
            raise

    def _chunks(self, request: GenerateRequest, script: Script) -> list[TokenChunk]:
        streams = [self._sequence(request, script, k) for k in range(request.n)]
        longest = max(map(len, streams))
        return [stream[i] for i in range(longest) for stream in streams if i < len(stream)]

    def _sequence(self, request: GenerateRequest, script: Script, k: int) -> list[TokenChunk]:
        length, chunks, sizes = self.lengths[k], [], list(script.sizes)
        had = len(request.generated[k]) if request.generated else 0
        at = ([b for b in self.borders[k] if b < had][-script.back :] or [had])[0] if script.back else had
        while True:
            end = min(length, at + (sizes.pop(0) if sizes else 3))
            last = end == length
            scored = request.sampling.prompt_logprobs is not None and k == 0 and not chunks
            chunks.append(
                TokenChunk(
                    request.request_id,
                    k,
                    at,
                    tuple(token(k, i) for i in range(at, end)),
                    "".join(word(k, i) for i in range(at, end)),
                    finish="length" if last else None,
                    stats=SpeculationStats(rounds=1) if last else None,
                    cached_tokens=len(PROMPT) + had if last else 0,
                    logprobs=tuple(Logprobs(-0.5 * i) for i in range(at, end)),
                    prompt_logprobs=(None, Logprobs(-1.0), Logprobs(-2.0)) if scored else (),
                )
            )
            self.borders[k] += [at, end]
            if last:
                return chunks
            at = end


def token(sequence: int, position: int) -> int:
    return (17 * sequence + 5 * position) % 251


def word(sequence: int, position: int) -> str:
    """Some tokens have no text, some have much."""
    return "" if position % 3 == 1 else f"{sequence}:{position}," * (1 + position % 2)


def request(n: int = 1, **sampling: object) -> GenerateRequest:
    return GenerateRequest("r", PROMPT, SamplingParams(max_tokens=50, seed=3, **sampling), n=n)  # type: ignore[arg-type]


def collect(replica: Replica, asked: GenerateRequest, patience: Patience = PATIENT) -> list[TokenChunk]:
    clock = replica.clock
    client = ResumingClient(replica, patience, clock.sleep, clock, random.Random(0).random)  # type: ignore[arg-type]

    async def read() -> list[TokenChunk]:
        return [chunk async for chunk in client.generate(asked)]

    return asyncio.run(read())


def heard(chunks: list[TokenChunk], n: int) -> list[tuple[object, ...]]:
    """Per sequence: ids, text, log-probabilities, finish. Checks that chunks join without gap or overlap."""
    result = []
    for k in range(n):
        own = [chunk for chunk in chunks if chunk.sequence == k]
        position = 0
        for chunk in own:
            assert chunk.first_position == position
            assert len(chunk.logprobs) == len(chunk.ids)
            position += len(chunk.ids)
        assert [chunk.finish for chunk in own if chunk.finish] == ["length"]
        assert own[-1].finish == "length"
        ids = [i for chunk in own for i in chunk.ids]
        text = "".join(chunk.text for chunk in own)
        result.append((ids, text, [p for chunk in own for p in chunk.logprobs]))
    return result


sizes = st.lists(st.integers(1, 5), min_size=1, max_size=8)
lost_runs = st.builds(
    Script,
    sizes,
    st.just(LOST),
    after=st.integers(0, 12),
    back=st.integers(0, 2),
    twice=st.booleans(),
)


@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    runs=st.lists(lost_runs, max_size=6),
    last=st.builds(Script, sizes, back=st.integers(0, 2), twice=st.booleans()),
    scored=st.booleans(),
)
def test_losses_cannot_be_heard(lengths: list[int], runs: list[Script], last: Script, scored: bool) -> None:
    asked = request(len(lengths), logprobs=0, prompt_logprobs=0 if scored else None)
    undisturbed = collect(Replica(lengths, [Script()]), asked)
    chunks = collect(Replica(lengths, [*runs, last]), asked, Patience(losses=99, fruitless=99, wait_s=1e9))
    assert heard(chunks, len(lengths)) == heard(undisturbed, len(lengths))
    assert [c.prompt_logprobs for c in chunks if c.prompt_logprobs] == (
        [(None, Logprobs(-1.0), Logprobs(-2.0))] if scored else []
    )
    assert all(chunk.cached_tokens <= len(PROMPT) for chunk in chunks)


def test_the_resumed_run_is_told_what_was_said_and_nothing_else_changes() -> None:
    replica = Replica([6, 6], [Script([2, 2], LOST, after=3), Script()])
    asked = request(2, prompt_logprobs=1)
    chunks = collect(replica, asked)
    first, second = replica.requests
    assert first.sampling == asked.sampling
    assert second.generated == (tuple(token(0, i) for i in range(4)), tuple(token(1, i) for i in range(2)))
    assert second == replace(
        asked, generated=second.generated, sampling=replace(asked.sampling, prompt_logprobs=None)
    )
    assert [chunk.stats for chunk in chunks if chunk.finish] == [SpeculationStats(rounds=1)] * 2


def test_an_undisturbed_stream_is_passed_on_as_it_is() -> None:
    replica = Replica([7], [Script([2, 3, 2])])
    assert collect(replica, request()) == replica._chunks(request(), Script([2, 3, 2]))
    assert len(replica.requests) == 1
    assert replica.closed == 0


def test_a_finished_sequence_is_not_said_again_and_the_run_ends_with_the_last_new_one() -> None:
    """Sequence 0 is done when the replica dies; the next replica would say it once more, at length."""
    replica = Replica([2, 4], [Script([2], LOST, after=2), Script([1, 9])])
    original = replica._sequence

    def restart(asked: GenerateRequest, script: Script, k: int) -> list[TokenChunk]:
        if k == 0 and len(replica.requests) == 2:
            return [TokenChunk("r", 0, 2, (9,), "again")] * 50
        return original(asked, script, k)

    replica._sequence = restart  # type: ignore[method-assign]
    chunks = collect(replica, request(2))
    assert "again" not in "".join(chunk.text for chunk in chunks)
    assert sum(chunk.finish is not None for chunk in chunks) == 2
    assert replica.closed == 1


def test_a_stream_that_just_ends_counts_as_lost() -> None:
    replica = Replica([5], [Script([2]), Script()])
    whole = replica._chunks

    def cut(asked: GenerateRequest, script: Script) -> list[TokenChunk]:
        return whole(asked, script)[: 1 if len(replica.requests) == 1 else None]

    replica._chunks = cut  # type: ignore[method-assign]
    assert heard(collect(replica, request()), 1) == heard(collect(Replica([5], [Script()]), request()), 1)
    assert len(replica.requests) == 2


def change(chunk: TokenChunk, what: str) -> TokenChunk:
    if what == "gap":
        return replace(chunk, first_position=chunk.first_position + 1)
    if what == "other tokens":
        return replace(chunk, first_position=0, ids=(250, token(0, 1), *chunk.ids))
    return replace(chunk, first_position=1, ids=(token(0, 1), *chunk.ids))


@pytest.mark.parametrize("what", ["gap", "other tokens", "within a chunk"])
def test_what_does_not_join_is_a_failure_and_not_a_text_of_two_halves(what: str) -> None:
    replica = Replica([6], [Script([2], LOST, after=1), Script([2])])
    whole = replica._chunks

    def odd(asked: GenerateRequest, script: Script) -> list[TokenChunk]:
        chunks = whole(asked, script)
        return chunks if len(replica.requests) == 1 else [change(chunks[0], what), *chunks[1:]]

    replica._chunks = odd  # type: ignore[method-assign]
    with pytest.raises(EngineFailure, match="resumed"):
        collect(replica, request())


@pytest.mark.parametrize("error", [EngineFailure("no"), InvalidRequest("no"), Overloaded("full")])
def test_other_failures_are_passed_on_at_once(error: Exception) -> None:
    replica = Replica([6], [Script(error=error, after=1)])
    with pytest.raises(type(error)):
        collect(replica, request())
    assert len(replica.requests) == 1


def test_a_full_replica_is_waited_for_once_a_stream_has_broken() -> None:
    full = Script(error=Overloaded("full"))
    replica = Replica([6], [Script([2], LOST, after=1), *[full] * 5, Script()])
    assert heard(collect(replica, request()), 1)
    assert len(replica.requests) == 7


def test_a_replica_that_comes_back_late_is_waited_for() -> None:
    replica = Replica([6], [Script([2], LOST, after=1), Script()])
    replica.down_until = 20.0
    collect(replica, request())
    assert 20 <= replica.clock.now < 22
    assert len(replica.requests) == 2  # it was not bothered in between


def test_each_chunk_renews_the_patience() -> None:
    replica = Replica([9], [Script([1], LOST, after=1), Script([1], LOST, after=1), Script()])
    generate = replica.generate

    def away(asked: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        replica.down_until = replica.clock.now + 40
        return generate(asked)

    replica.generate = away  # type: ignore[method-assign]
    collect(replica, request())
    assert replica.clock.now > 80


def test_waiting_ends_when_no_replica_comes_back() -> None:
    replica = Replica([6], [Script([2], LOST, after=1)])
    replica.down_until = 1e9
    with pytest.raises(ReplicaLost):
        collect(replica, request())
    assert 60 <= replica.clock.now < 62


def test_a_replica_that_never_answers_is_not_waited_for_without_end() -> None:
    replica = Replica([6], [Script([2], LOST, after=1)])

    async def never() -> ModelInfo:
        await asyncio.Event().wait()
        raise AssertionError

    replica.info = never  # type: ignore[method-assign]
    with pytest.raises(ReplicaLost):
        collect(replica, request(), Patience(wait_s=0.1))


@pytest.mark.parametrize("chunks_before", [0, 2])
def test_a_request_that_kills_replicas_is_given_up(chunks_before: int) -> None:
    deadly = Script(error=LOST)
    replica = Replica([9], [Script([1, 1], LOST, after=chunks_before), *[deadly] * 9])
    with pytest.raises(ReplicaLost):
        collect(replica, request())
    assert len(replica.requests) == 3


def test_progress_is_rewarded_but_not_for_ever() -> None:
    replica = Replica([200], [Script([1], LOST, after=1)] * 99)
    with pytest.raises(ReplicaLost):
        collect(replica, replace(request(), sampling=SamplingParams(max_tokens=200)))
    assert len(replica.requests) == 9


def test_a_run_without_a_chunk_lets_others_get_ahead() -> None:
    def waited(after: int) -> float:
        replica = Replica([9], [Script(error=LOST, after=after), Script()])
        collect(replica, request())
        return replica.clock.now

    assert waited(after=1) < 0.1
    assert 1 <= waited(after=0) < 2.1


def test_leaving_closes_the_stream_behind() -> None:
    replica = Replica([9], [Script()])

    async def leave() -> None:
        stream = ResumingClient(replica).generate(request())  # type: ignore[arg-type]
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert replica.closed == 1
