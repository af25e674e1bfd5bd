"""Speculative = plain over the whole parameter space, on a real network with real grammars, in float32."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoint import byte_tokenizer
from support.decoding import Outcome, run
from tiny import tiny_llama

from gammaray.engine.build import TokenizerDecoder
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.grammar import GrammarCompiler
from gammaray.engine.loading import load_runner
from gammaray.engine.runner import ModelRunner
from gammaray.types import PLAIN, GenerateRequest, Grammar, Logprobs, SamplingParams, SpeculationPlan

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
VOCAB = len(TOKENIZER)
SCHEMA = {
    "type": "object",
    "properties": {"ab": {"enum": ["ab", "abab"]}, "n": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["ab", "n"],
    "additionalProperties": False,
}  # fmt: skip
GRAMMARS = [
    None,
    Grammar("json_object"),
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", "(ab|abc)+d?(é|漢){0,3}"),
]
COMPILER = GrammarCompiler(TOKENIZER, VOCAB, [EOS])


@pytest.fixture(scope="module")
def runners() -> dict[str, ModelRunner]:
    shape = {"num_blocks": 96, "block_size": 8, "max_model_len": 96, "dtype": "float32"}
    return {
        "target": load_runner(tiny_llama(VOCAB, layers=2), **shape),
        "same": load_runner(tiny_llama(VOCAB, layers=2), **shape),
        "other": load_runner(tiny_llama(VOCAB, layers=1, seed=5), **shape),
    }


def engine(runners: dict[str, ModelRunner], budget: int = 48) -> Engine:
    drafters = {
        "ngram": NgramDrafter(3, 1),
        "same": ModelDrafter(runners["same"]),
        "sampled": ModelDrafter(runners["other"], draft_sampling=True),
    }
    options = EngineOptions(max_batch=4, token_budget=budget, oracle=True)
    decoder = TokenizerDecoder(TOKENIZER)
    return Engine(runners["target"], decoder, [EOS], drafters, options, grammars=COMPILER)  # type: ignore[arg-type]


tokens = st.integers(0, VOCAB - 2)
sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.8, 1.3]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**63),
    max_tokens=st.integers(10, 40),
    stop=st.sampled_from([(), ("bab",), ("d", "}")]),
    min_tokens=st.integers(0, 10),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
    bad_words=st.lists(st.lists(tokens, min_size=2, max_size=3).map(tuple), max_size=3).map(tuple),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 20, width=32), max_size=4)
    .map(lambda biases: tuple(biases.items())),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.9]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.2, -0.3]),
    grammar=st.sampled_from(GRAMMARS),
    logprobs=st.sampled_from([None, 0, 5]),
    prompt_logprobs=st.sampled_from([None, 2]),
)  # fmt: skip
requests = st.lists(
    st.builds(
        GenerateRequest,
        request_id=st.just("?"),
        prompt=st.lists(tokens, min_size=1, max_size=20).map(tuple),
        sampling=sampling,
        plan=st.builds(
            SpeculationPlan,
            drafter=st.sampled_from(["ngram", "same", "sampled"]),
            gamma=st.integers(1, 5),
            width=st.integers(1, 3),
        ),
        n=st.integers(1, 2),
    ),
    min_size=1,
    max_size=3,
).map(lambda batch: [replace(request, request_id=str(i)) for i, request in enumerate(batch)])


def numbers(entries: list[Logprobs | None] | tuple[Logprobs | None, ...]) -> list[float]:
    return [x for entry in entries if entry for x in (entry.logprob, *(value for _, value in entry.top))]


def same(found: Outcome, expected: Outcome) -> bool:
    close = [
        numbers(a) == pytest.approx(numbers(b), abs=1e-3)
        for a, b in (
            (found.logprobs, expected.logprobs),
            (found.prompt_logprobs, expected.prompt_logprobs),
        )
    ]
    return (found.ids, found.text, found.finish) == (expected.ids, expected.text, expected.finish) and all(
        close
    )


@settings(max_examples=40)
@given(batch=requests, budget=st.sampled_from([8, 48]))
def test_any_parameters_in_any_batch_give_what_plain_decoding_gives_alone(
    runners: dict[str, ModelRunner], batch: list[GenerateRequest], budget: int
) -> None:
    served = engine(runners, budget)
    outcomes = run(served, batch)
    for request in batch:
        for key, expected in run(engine(runners), [replace(request, plan=PLAIN)]).items():
            assert same(outcomes[key], expected), request
            assert expected.finish != "error"
    assert served.cache.pool.used == 0


@pytest.mark.parametrize("grammar", GRAMMARS[1:], ids=lambda grammar: grammar.kind)
def test_drafts_are_accepted_under_a_grammar(runners: dict[str, ModelRunner], grammar: Grammar) -> None:
    """The drafter does not know the grammar, but has such a text in its prompt."""
    accepted = 0
    for seed in range(4):
        text = '{"ab":"abab","n":12}' if grammar.kind != "regex" else "ababcababcd"
        asked = GenerateRequest(
            "r",
            tuple(TOKENIZER(text)["input_ids"] * 2),
            SamplingParams(temperature=0.5, seed=seed, max_tokens=40, grammar=grammar),
            SpeculationPlan("ngram", 4, 1),
        )
        (found,) = run(engine(runners), [asked]).values()
        assert found.stats is not None
        accepted += found.stats.accepted
        if found.finish == "stop" and grammar.kind == "regex":
            assert re.fullmatch(grammar.text, found.text)
        elif found.finish == "stop":
            json.loads(found.text)
    assert accepted > 0
