"""An engine and a tokenizer of a few lines, and clients that talk to the application in-process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import openai
import pytest
from support.asgi import connect

from gammaray.api.app import create_app
from gammaray.config import Config, parse
from gammaray.routing.plan import Router
from gammaray.types import GenerateRequest, Health, Logprobs, ModelInfo, SpeculationStats, TokenChunk

CONFIG = {
    "target": {"model": "tiny"},
    "drafters": {"lookup": {"method": "ngram"}, "other": {"method": "ngram"}},
    "tenants": {"default": {"drafter": "lookup", "speculation": {"gamma": 4, "tree_width": 2}}},
}
INFO = ModelInfo(
    "tiny", vocab_size=256, max_model_len=64, dtype="float32", device="cpu", drafters=("lookup",)
)
ROUNDS = ("Hel", "lo ", "wörld")


class FakeEngine:
    """Every sequence says `rounds`; the seed picks nothing. Notes what was asked and what was aborted."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.rounds: tuple[str, ...] = ROUNDS
        self.fail_at: dict[int, Exception] = {}  # round -> what is raised there
        self.finish = "stop"
        self.stop_at: int | None = None  # blocks before this round until `go`
        self.go = asyncio.Event()
        self.info_error: Exception | None = None

    async def info(self) -> ModelInfo:
        if self.info_error:
            raise self.info_error
        return INFO

    async def health(self) -> Health:
        return Health("ok", 0.5, running=1, waiting=2, kv_used_blocks=3, kv_total_blocks=4)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        done = False
        try:
            for number, text in enumerate(self.rounds):
                if number == self.stop_at:
                    await self.go.wait()
                if number in self.fail_at:
                    raise self.fail_at[number]
                for sequence in range(request.n):
                    yield self._chunk(request, sequence, number, text)
                await asyncio.sleep(0)
            done = True
        finally:
            if not done:
                self.aborted.append(request.request_id)

    def _chunk(self, request: GenerateRequest, sequence: int, number: int, text: str) -> TokenChunk:
        last = number == len(self.rounds) - 1
        first = 2 * number
        counts = {"lengths": (0, 1, 1, 1), "tries": (6,), "first_hits": 3}
        stats = SpeculationStats(3, 12, 10, 3, 6, 6, 3, **counts) if last else None
        return TokenChunk(
            request.request_id,
            sequence,
            first,
            (first, first + 1),
            text if sequence == 0 else f"{text}{sequence}",
            finish=self.finish if last else None,  # type: ignore[arg-type]
            stats=stats,
            cached_tokens=5 if last and sequence == 0 else 7 if last else 0,
            error="boom" if last and self.finish == "error" else None,
            logprobs=logprobs((first, first + 1), request.sampling.logprobs),
            prompt_logprobs=prompt_logprobs(request) if sequence == number == 0 else (),
        )


def logprobs(ids: Sequence[int], top: int | None) -> tuple[Logprobs, ...]:
    """Token i has -i/8; the best are the tokens 1, 2, ... of the vocabulary."""
    if top is None:
        return ()
    best = tuple((token, -token / 8) for token in range(1, top + 1))
    return tuple(Logprobs(-token / 8, best) for token in ids)


def prompt_logprobs(request: GenerateRequest) -> tuple[Logprobs | None, ...]:
    if request.sampling.prompt_logprobs is None:
        return ()
    return (None, *logprobs(request.prompt[1:], request.sampling.prompt_logprobs))


class FakeTokenizer:
    """UTF-8 bytes; 0 is a special token."""

    def __init__(self) -> None:
        self.bos_token_id: int | None = 1
        self.encoded = 0  # characters

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded += len(text)
        return list(text.encode())

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        special = b"" if skip_special_tokens else b"<end>"
        return b"".join(bytes([i]) if i else special for i in ids).decode(errors="replace")

    def convert_ids_to_tokens(self, ids: int) -> str:
        return f"<0x{ids:02X}>"

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(128)}

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        sanitize_control_tokens: bool,
        return_dict: bool,
    ) -> list[int]:
        assert sanitize_control_tokens and not return_dict
        if conversation[0]["role"] == "assistant":
            raise ValueError("roles must alternate")
        end = "" if add_generation_prompt else "~" if continue_final_message else "."
        return self.encode("|".join(turn["role"][0] + turn["content"] for turn in conversation) + end)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def tokenizer() -> FakeTokenizer:
    return FakeTokenizer()


@pytest.fixture
def config() -> Config:
    return parse(CONFIG, "test")


@pytest.fixture
def app(engine: FakeEngine, tokenizer: FakeTokenizer, config: Config):
    return create_app(engine, tokenizer, Router(config), config)


@pytest.fixture
def make_app(engine: FakeEngine, tokenizer: FakeTokenizer):
    """The application under a configuration with other sections."""

    def make(clock: Callable[[], float] = time.monotonic, **sections: Any):
        config = parse(CONFIG | sections, "test")
        return create_app(engine, tokenizer, Router(config), config, clock=clock)

    return make


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def http(app) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(app) as client:
        yield client


@pytest.fixture
async def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="unused", base_url="http://test/v1", http_client=http, max_retries=0)
