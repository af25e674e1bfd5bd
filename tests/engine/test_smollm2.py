"""The embedded model: speculative against plain under the near-tie rule, and 64 streams at once.

Rounding changes with the shape of a batch. In float32 that may only flip a tie closer than 1e-3; in bfloat16
each emitted token must be within 0.25 of the best logit of a teacher-forced pass.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from support.decoding import Outcome, run
from support.embedded import MODEL, needs_embedded
from transformers import PreTrainedTokenizerBase

from gammaray.engine.build import TokenizerDecoder, eos_ids
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.loading import load_runner, load_tokenizer
from gammaray.engine.runner import ModelRunner
from gammaray.engine.service import AsyncEngine
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan, TokenChunk

pytestmark = [
    pytest.mark.smollm2,
    needs_embedded,
]

PROMPTS = [
    "Write this sentence three times: The lighthouse of Lindau was built in 1856.",
    "Rename the variable total to amount:\n\ndef add(items):\n    total = 0\n    for i in items:\n"
    "        total += i\n    return total\n",
    "Why do cats purr?",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return load_runner(MODEL, dtype=request.param, num_blocks=1024)


def engine(runner: ModelRunner, tokenizer: PreTrainedTokenizerBase, **options: object) -> Engine:
    drafters = {"chain": NgramDrafter(3, 1)}
    end = eos_ids(runner, tokenizer)
    return Engine(runner, TokenizerDecoder(tokenizer), end, drafters, EngineOptions(**options))  # type: ignore[arg-type]


def requests(tokenizer: PreTrainedTokenizerBase, max_tokens: int = 40) -> list[GenerateRequest]:
    found = []
    for index, text in enumerate(PROMPTS):
        message = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        found.append(GenerateRequest(str(index), tuple(ids), sampling, SpeculationPlan("chain", 6, 2)))
    return found


def shortfall(runner: ModelRunner, prompt: tuple[int, ...], ids: list[int]) -> torch.Tensor:
    """How far each emitted token's logit lies below the best one, teacher-forced: [T]."""
    logits, _ = runner.dense([*prompt, *ids[:-1]])
    rows = logits[len(prompt) - 1 :]  # [T, V]
    return rows.amax(-1) - rows.gather(1, torch.tensor(ids)[:, None])[:, 0]


def test_speculation_changes_at_most_near_ties(
    runner: ModelRunner, tokenizer: PreTrainedTokenizerBase
) -> None:
    tolerance = 1e-3 if runner.dtype == torch.float32 else 0.25
    speculative = run(engine(runner, tokenizer), requests(tokenizer))
    accepted = 0
    for request in requests(tokenizer):
        (plain,) = run(engine(runner, tokenizer), [replace(request, plan=PLAIN)]).values()
        found: Outcome = speculative[request.request_id, 0]
        assert found.stats is not None
        accepted += found.stats.accepted
        if runner.dtype == torch.float32 and found.ids == plain.ids:
            continue
        assert shortfall(runner, request.prompt, found.ids).max() <= tolerance  # 0.25: two steps of bf16 here
    assert accepted > 10


def test_rows_of_its_head_are_those_of_its_embedding(runner: ModelRunner) -> None:
    """A head that shares them gets weights: no blocks of a quantised file, and not oneDNN's layout."""
    tokens = torch.tensor([2, 49151, 17])
    weight, bias = runner.telling.head_rows(tokens)
    assert bias is None and torch.equal(weight, runner.telling.embed(tokens))


def test_64_streams_of_mixed_settings(runner: ModelRunner, tokenizer: PreTrainedTokenizerBase) -> None:
    """All finish, the oracle is silent, the pool returns to its baseline."""
    served = engine(runner, tokenizer, oracle=True)
    assert served.cache.pool.used == 0
    shell = AsyncEngine(served)
    plans = [PLAIN, SpeculationPlan("chain", 4), SpeculationPlan("chain", 8), SpeculationPlan("chain", 3, 3)]
    base = requests(tokenizer)

    def mixed(i: int) -> GenerateRequest:
        sampling = SamplingParams(
            temperature=(0.0, 0.7, 1.0)[i % 3],
            top_k=(0, 40)[i % 2],
            top_p=(1.0, 0.9)[i // 2 % 2],
            seed=i,
            max_tokens=4 + i % 9,
            stop=((), ("the",))[i // 3 % 2],
        )
        n = 2 if i % 16 == 0 else 1
        return replace(
            base[i % 3], request_id=str(i), sampling=sampling, plan=plans[i % 4], n=n, tenant="ab"[i % 2]
        )

    async def read(request: GenerateRequest) -> list[TokenChunk]:
        return [chunk async for chunk in shell.generate(request)]

    async def everyone() -> list[list[TokenChunk]]:
        return await asyncio.gather(*(read(mixed(i)) for i in range(64)))

    results = asyncio.run(everyone())
    shell.shutdown()
    for i, chunks in enumerate(results):
        ends = [chunk for chunk in chunks if chunk.finish]
        assert [chunk.finish in ("stop", "length") for chunk in ends] == [True] * mixed(i).n
    assert served.cache.pool.used == 0
