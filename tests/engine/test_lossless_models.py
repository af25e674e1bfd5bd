"""The same claim as test_lossless.py, on real networks in float32: a Llama target and Llama drafters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decoding import Outcome, run
from support.tape import Letters
from tiny import tiny_llama
from transformers import PreTrainedModel

from gammaray.engine.drafters.base import Drafter
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.loading import load_runner
from gammaray.engine.runner import ModelRunner
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan

VOCAB = 12
LENGTH = 64


def perturbed(model: PreTrainedModel, scale: float) -> PreTrainedModel:
    """Nearly the same weights: a drafter that is right often, not always."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for weight in model.parameters():
            weight += scale * weight.std() * torch.randn_like(weight)
    return model


@pytest.fixture(scope="module")
def runners() -> dict[str, ModelRunner]:
    shape = {"num_blocks": 64, "block_size": 8, "max_model_len": LENGTH, "dtype": "float32"}
    return {
        "target": load_runner(tiny_llama(VOCAB, layers=3), **shape),
        "close": load_runner(perturbed(tiny_llama(VOCAB, layers=3), 0.05), **shape),
        "sampled": load_runner(perturbed(tiny_llama(VOCAB, layers=3), 0.05), **shape),
        "small": load_runner(tiny_llama(VOCAB, layers=1, seed=5), **shape),
    }


def engine(runners: dict[str, ModelRunner], max_batch: int = 4, budget: int = 32) -> Engine:
    drafters: dict[str, Drafter] = {
        "ngram": NgramDrafter(3, 1),
        "close": ModelDrafter(runners["close"]),
        "sampled": ModelDrafter(runners["sampled"], draft_sampling=True),
        "small": ModelDrafter(runners["small"]),
    }
    options = EngineOptions(max_batch=max_batch, token_budget=budget, oracle=True)
    return Engine(runners["target"], Letters(), drafters=drafters, options=options)


requests = st.lists(
    st.builds(
        GenerateRequest,
        request_id=st.just("?"),
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24).map(tuple),
        sampling=st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 1.0]),
            top_p=st.sampled_from([1.0, 0.9]),
            seed=st.integers(0, 2**63),
            max_tokens=st.integers(1, 20),
        ),
        plan=st.builds(
            SpeculationPlan,
            drafter=st.sampled_from(["ngram", "close", "sampled", "small"]),
            gamma=st.integers(1, 5),
            width=st.integers(1, 3),
        ),
    ),
    min_size=1,
    max_size=4,
).map(lambda batch: [replace(request, request_id=str(i)) for i, request in enumerate(batch)])


@settings(max_examples=25)
@given(batch=requests, budget=st.sampled_from([8, 32]))
def test_a_mixed_batch_equals_plain_decoding_alone(
    runners: dict[str, ModelRunner], batch: list[GenerateRequest], budget: int
) -> None:
    outcomes = run(engine(runners, budget=budget), batch)
    for request in batch:
        (expected,) = run(engine(runners), [replace(request, plan=PLAIN)]).values()
        found = outcomes[request.request_id, 0]
        assert (found.ids, found.finish) == (expected.ids, expected.finish)


def outcome(runners: dict[str, ModelRunner], drafter: str, **plan: int) -> Outcome:
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    request = GenerateRequest("r", (1, 2, 3, 4, 5), sampling, SpeculationPlan(drafter, **plan))
    (found,) = run(engine(runners), [request]).values()
    return found


def test_a_close_drafter_is_accepted_often(runners: dict[str, ModelRunner]) -> None:
    stats = outcome(runners, "close", gamma=4).stats
    assert stats is not None
    assert stats.alpha is not None
    assert stats.alpha > 0.5


def test_a_tree_is_accepted_at_least_as_often_as_a_chain(runners: dict[str, ModelRunner]) -> None:
    chain, tree = (outcome(runners, "close", gamma=3, width=width).stats for width in (1, 4))
    assert chain is not None
    assert tree is not None
    assert tree.rounds <= chain.rounds
