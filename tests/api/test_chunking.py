"""However rounds cut the tokens into chunks: the stream is the whole answer, and the whole is one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import sse
from support.serving import ByteTokenizer

from gammaray.api.answer import Answer
from gammaray.api.chunks import chunks
from gammaray.api.job import Job
from gammaray.api.prompt import Inputs
from gammaray.api.shape import CHAT, COMPLETION, Shape
from gammaray.api.stream import event, events
from gammaray.api.tokens import Vocabulary
from gammaray.engine.text import OutputText
from gammaray.types import PLAIN, GenerateRequest, Logprobs, SamplingParams, TokenChunk

END = 0
PROMPT = "hä"
VOCABULARY = Vocabulary(ByteTokenizer())


class Bytes:
    """One token a byte: characters and stop strings lie across tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class Scripted:
    """Sequence k says `said[k]` in blocks of `sizes`, and ends at a stop string as the engine does."""

    def __init__(self, said: Sequence[Sequence[int]], sizes: Sequence[int], turns: Sequence[int]) -> None:
        self.said, self.sizes, self.turns = said, sizes, turns

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        waiting = [self._chunks(request, k) for k in range(request.n)]
        turns = list(self.turns)
        while any(waiting):
            turn = turns.pop() if turns else 0
            some = [chunks for chunks in waiting if chunks]
            yield some[turn % len(some)].pop(0)

    def _chunks(self, request: GenerateRequest, sequence: int) -> list[TokenChunk]:
        sampling, found, position = request.sampling, [], 0
        output, ids = OutputText(Bytes(), sampling.stop), list(self.said[sequence])
        for size in [*self.sizes, len(ids)]:
            ended = any(self._push(output, token) for token in ids[:size])
            ids = ids[size:]
            finish = "stop" if ended else None if ids else "length"
            taken, text = output.take(final=finish is not None)
            found.append(
                TokenChunk(
                    request.request_id,
                    sequence,
                    position,
                    tuple(taken),
                    text,
                    finish,  # type: ignore[arg-type]
                    logprobs=found_at(taken, position, sampling.logprobs),
                    prompt_logprobs=prompt_found(request) if sequence == 0 and not found else (),
                )
            )
            position += len(taken)
            if finish:
                break
        return found

    def _push(self, output: OutputText, token: int) -> bool:
        return output.end(token) or True if token == END else output.push(token)


def found_at(ids: Sequence[int], position: int, top: int | None) -> tuple[Logprobs, ...]:
    if top is None:
        return ()
    best = ((195, -0.5), (97, -0.75))[:top]
    return tuple(Logprobs(-(position + i) - token / 256, best) for i, token in enumerate(ids))


def prompt_found(request: GenerateRequest) -> tuple[Logprobs | None, ...]:
    top = request.sampling.prompt_logprobs
    return () if top is None else (None, *found_at(request.prompt[1:], 100, top))


def job(n: int, top: int | None, echo: bool, stop: tuple[str, ...]) -> Job:
    sampling = SamplingParams(stop=stop, logprobs=top, prompt_logprobs=top if echo else None)
    ids = tuple(PROMPT.encode())
    inputs = Inputs(VOCABULARY, (ids,), texts=(PROMPT,) if echo else ())
    requests = (GenerateRequest("r-0", ids, sampling, n=n),)
    return Job("r", 7, "tiny", n, inputs, requests, PLAIN, (), has_logprobs=top is not None)


async def whole(engine: Scripted, job: Job, shape: Shape) -> dict:
    answer = Answer(job)
    async for index, chunk in chunks(engine, job):  # type: ignore[arg-type]
        answer.add(index, chunk)
    return shape.answer(answer)


async def streamed(engine: Scripted, job: Job, shape: Shape) -> list[dict]:
    source = events(chunks(engine, job), Answer(job), shape, include_usage=True)  # type: ignore[arg-type]
    return sse.events(b"".join([item async for item in source]))


def put_together(sent: list[dict], n: int) -> list[dict]:
    """The choices of a whole answer, from the events of a stream."""
    choices: list[dict] = [
        {"index": i, "text": "", "logprobs": None, "finish_reason": None} for i in range(n)
    ]
    for choice in (choice for item in sent for choice in item["choices"]):
        into = choices[choice["index"]]
        assert into["finish_reason"] is None, "an event after the last of its choice"
        into["text"] += choice["delta"]["content"] if "delta" in choice else choice["text"]
        into["finish_reason"] = choice["finish_reason"]
        for key, found in (choice["logprobs"] or {}).items():
            before = (into["logprobs"] or {}).get(key, [])
            into["logprobs"] = (into["logprobs"] or {}) | {key: None if found is None else before + found}
    return choices


def plain(choice: dict) -> dict:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return {key: choice[key] for key in ("index", "logprobs", "finish_reason")} | {"text": text}


words = st.text(alphabet="aß漢😀 h\n\u2028\x85", max_size=10)
tokens = st.builds(
    lambda text, cut, end: [*text.encode()[: len(text.encode()) - cut], *[END] * end],
    words,
    st.integers(0, 2),
    st.booleans(),
)


@pytest.mark.parametrize("shape", [COMPLETION, CHAT], ids=["completion", "chat"])
@given(
    said=st.lists(tokens, min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 6), max_size=8),
    turns=st.lists(st.integers(0, 2), max_size=12),
    stop=st.lists(st.text(alphabet="aß漢 h", min_size=1, max_size=3), max_size=2),
    top=st.sampled_from([None, 0, 2]),
    echo=st.booleans(),
)
@example(said=[[*b"a ha ha ha"]], sizes=[1, 7], turns=[], stop=[" ha ha ha"], top=2, echo=False)
@example(said=[[97], [97, 98]], sizes=[1], turns=[1, 1, 1], stop=[], top=2, echo=True)
def test_stream_equals_whole(shape: Shape, said, sizes, turns, stop, top, echo) -> None:
    asked = job(len(said), top, echo and shape is COMPLETION, tuple(stop))

    async def both() -> tuple[dict, dict, list[dict]]:
        engine = Scripted(said, sizes, turns)
        return (
            await whole(Scripted(said, [], []), asked, shape),
            await whole(engine, asked, shape),
            await streamed(engine, asked, shape),
        )

    in_one, cut, found = asyncio.run(both())
    assert cut == in_one
    expected = [plain(choice) for choice in in_one["choices"]]
    assert put_together(found, len(said)) == expected
    assert found[-1]["usage"] == in_one["usage"]
    assert "\ufffd" not in json.dumps(found, ensure_ascii=False)
    count = sum(entries(choice) for choice in expected) - asked_for(asked)
    assert top is None or in_one["usage"]["completion_tokens"] == count
    if shape is COMPLETION and top is not None:
        for choice in expected:
            offsets = choice["logprobs"]["text_offset"]
            assert offsets == sorted(offsets) and offsets[:1] <= [0] and offsets[-1:] <= [len(choice["text"])]


def entries(choice: dict) -> int:
    found = choice["logprobs"] or {}
    return len(found.get("content", found.get("tokens", ())))


def asked_for(job: Job) -> int:
    return job.n * len(job.inputs.prompts[0]) if job.inputs.texts else 0


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@given(st.lists(st.dictionaries(st.text(), values, max_size=4), max_size=4))
@example([{"text": "a\r\nb\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\x00: data: \n\ndata: x"}])
def test_events_are_read_back(sent: list[dict]) -> None:
    stream = b"".join(map(event, sent))
    assert [json.loads(item) for item in sse.data(stream)] == sent
    # Clients that split with str.splitlines, which knows more line ends than the standard.
    assert len(stream.decode().splitlines()) == 2 * len(sent)
