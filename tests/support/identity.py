"""Does a request give the same bits in every company? Engines, a drafter and a workload to find out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gammaray.engine.drafters.base import Drafter, DraftTree, DraftView, Ticket
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.pool import KVPool, KVShape
from gammaray.engine.runner import ModelRunner
from gammaray.engine.text import TextDecoder
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan
from support.decoding import Outcome, run

PLANS = (
    PLAIN,
    SpeculationPlan("guesser", 6, 1),
    SpeculationPlan("guesser", 4, 4),
    SpeculationPlan("ngram", 8, 1),
    SpeculationPlan("ngram", 4, 3),
)
# What a batch is like: many rows; few, in small chunks and with too few blocks; many with too few blocks.
COMPANIES: tuple[dict[str, Any], ...] = (
    {"max_batch": 16, "budget": 256, "blocks": 1024, "block_size": 16, "prefix_cache": True},
    {"max_batch": 6, "budget": 41, "blocks": 96, "block_size": 7, "prefix_cache": False},
    {"max_batch": 24, "budget": 96, "blocks": 100, "block_size": 16, "prefix_cache": True},
)
TOPICS = ("a lake in winter", "cats", "the number seven", "old bridges", "how bread rises", "a red bicycle")
TASKS = (
    "Write one sentence about {0}.",
    "Repeat exactly: {0}, {0} and {1}, then {0}, {0} and {1} again.",
    "List three facts about {0} and {1}.",
    "Continue this text. It was a story about {0}. It was a story about {1}. It was a story about {0}.",
)


class Guesser:
    """Drafts trees around texts that it knows: each level holds the right token four times out of five."""

    vocab_size: int | None = None

    def __init__(self, scripts: Mapping[str, Sequence[int]], vocab_size: int) -> None:
        self.scripts = scripts  # request id -> prompt and output
        self.random = random.Random(5)
        self.vocab = vocab_size

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views))

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        return {view.rid: self._tree(view) for view in ticket.views}

    def _tree(self, view: DraftView) -> DraftTree:
        ahead = self.scripts[view.rid.rpartition("/")[0]][view.length :][: view.depth]
        tokens: list[int] = []
        parents: list[int] = []
        level, right = [-1], -1
        for depth in range(view.depth):
            nodes = []
            place = self.random.randrange(view.width)
            for rank in range(view.width):
                true = rank == place and depth < len(ahead) and self.random.random() < 0.8
                parent = right if true else self.random.choice(level)
                nodes.append((ahead[depth] if true else self.random.randrange(self.vocab), parent, true))
            level = [len(tokens) + i for i in range(view.width)]
            right = next((at for at, node in zip(level, nodes, strict=True) if node[2]), level[0])
            tokens += [node[0] for node in nodes]
            parents += [node[1] for node in nodes]
        return DraftTree(tuple(tokens), tuple(parents))

    def commit(self, rid: str, tokens: Sequence[int], features: torch.Tensor | None = None) -> None: ...

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None: ...

    def release(self, rid: str) -> None: ...

    def length(self, rid: str) -> int | None:
        return None


def with_pool(runner: ModelRunner, blocks: int, block_size: int) -> ModelRunner:
    """The same model on a pool of its own, full of NaN."""
    shapes = [KVShape(k.shape[2], k.shape[3], v.shape[3]) for k, v in runner._pool.layers]
    pool = KVPool(shapes, blocks, block_size, runner.dtype)
    for k, v in pool.layers:
        k.fill_(float("nan"))
        v.fill_(float("nan"))
    return ModelRunner(
        runner._model,
        pool,
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        sizes=runner._sizes,
    )


def engine(
    runner: ModelRunner,
    decoder: TextDecoder,
    scripts: Mapping[str, Sequence[int]],
    max_batch: int = 1,
    budget: int = 256,
    blocks: int = 64,
    block_size: int = 16,
    prefix_cache: bool = False,
    small: ModelRunner | None = None,
) -> Engine:
    """The model on a pool of its own, with an n-gram drafter, one that knows `scripts`, and a small model."""
    drafters: dict[str, Drafter] = {
        "ngram": NgramDrafter(3, 1),
        "guesser": Guesser(scripts, runner.vocab_size),
    }
    if small is not None:
        drafters["small"] = ModelDrafter(with_pool(small, small.num_blocks, block_size))
    options = EngineOptions(max_batch=max_batch, token_budget=budget, prefix_cache=prefix_cache)
    return Engine(with_pool(runner, blocks, block_size), decoder, (), drafters, options)


def workload(count: int, tokenizer: Any, least: int = 24, most: int = 48) -> list[GenerateRequest]:
    """Chats that begin alike, half of them at temperature 0; `least` to `most` tokens of output."""
    choose = random.Random(0)
    found = []
    for number in range(count):
        text = choose.choice(TASKS).format(*choose.sample(TOPICS, 2))
        messages = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        sampling = SamplingParams(
            temperature=choose.choice([0.0, 0.0, 0.7, 1.0]),
            top_p=choose.choice([1.0, 0.9]),
            top_k=choose.choice([0, 0, 50]),
            seed=choose.getrandbits(64),
            max_tokens=choose.randint(least, most),
            logprobs=2,
        )
        found.append(GenerateRequest(str(number), tuple(prompt["input_ids"]), sampling))
    return found


def outcomes(
    runner: ModelRunner,
    decoder: TextDecoder,
    requests: Sequence[GenerateRequest],
    plans: Sequence[SpeculationPlan] = PLANS[1:4],
    companies: Sequence[dict[str, Any]] = COMPANIES,
) -> Iterator[tuple[str, dict[str, Outcome]]]:
    """Each request in every way, by id: alone and plainly, alone with each plan, and in each company."""
    scripts: dict[str, list[int]] = {}
    plain = {}
    for request in requests:
        plain[request.request_id] = _alone(engine(runner, decoder, scripts), request)
        scripts[request.request_id] = [*request.prompt, *plain[request.request_id].ids]
    yield "alone, plain", plain
    for plan in plans:
        found = {
            request.request_id: _alone(engine(runner, decoder, scripts), replace(request, plan=plan))
            for request in requests
        }
        yield f"alone, {plan.drafter} {plan.gamma} x {plan.width}", found
    for turn, company in enumerate(companies):
        batch = [replace(r, plan=PLANS[(i + turn) % len(PLANS)]) for i, r in enumerate(requests)]
        random.Random(turn).shuffle(batch)
        together = run(engine(runner, decoder, scripts, **company), batch)
        yield f"among others, {describe(company)}", {rid: outcome for (rid, _), outcome in together.items()}


def describe(company: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in company.items())


def _alone(served: Engine, request: GenerateRequest) -> Outcome:
    (outcome,) = run(served, [request]).values()
    return outcome


def same_bits(found: Outcome, expected: Outcome) -> bool:
    return (found.ids, found.logprobs, found.finish) == (expected.ids, expected.logprobs, expected.finish)
