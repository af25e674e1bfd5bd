"""An engine and a tokenizer of a few lines, and clients that talk to the application in-process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import partial

import httpx
import openai
import pytest

from gammaray.api.app import create_app
from gammaray.config import Config, parse
from gammaray.routing.plan import plan
from gammaray.types import GenerateRequest, ModelInfo, SpeculationStats, TokenChunk

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
        stats = SpeculationStats(3, 12, 10, 3, 6, 6, 3, (0, 1, 1, 1)) if last else None
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
        )


class FakeTokenizer:
    """UTF-8 bytes."""

    def __init__(self) -> None:
        self.bos_token_id: int | None = 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(
        self, conversation: Sequence[dict[str, str]], *, add_generation_prompt: bool, return_dict: bool
    ) -> list[int]:
        assert add_generation_prompt and not return_dict
        if conversation[0]["role"] == "assistant":
            raise ValueError("roles must alternate")
        return self.encode("|".join(turn["role"][0] + turn["content"] for turn in conversation))


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
    return create_app(engine, tokenizer, partial(plan, config.tenants["default"], config.drafters), config)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def http(app) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
async def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="unused", base_url="http://test/v1", http_client=http, max_retries=0)
