"""Batches of everything over the tape model (support/tape.py), and what plain decoding makes of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hypothesis import strategies as st

from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.profile import StepProfile
from gammaray.engine.text import TextDecoder
from gammaray.types import PLAIN, GenerateRequest, Grammar, SamplingParams, SpeculationPlan

from .ahead import AheadDrafter
from .decoding import Cycles, Outcome, run
from .tape import Letters, Pieces, TapeRunner

VOCAB = 6
EOS = 5
LENGTH = 48
LETTERS = Letters()
SPLIT = Pieces(b"a", b"b", "漢".encode()[:1], "漢".encode()[1:], b"", b"d")  # characters over two tokens


def engine(
    blocks: int = 64,
    block_size: int = 4,
    max_batch: int = 8,
    budget: int = 64,
    prefix_cache: bool = True,
    decoder: TextDecoder = LETTERS,
    profile: StepProfile | None = None,
    asynchronous: bool = False,
) -> Engine:
    """With a drafter of each kind, and the state oracle on."""

    def drafter_model(noise: float, length: int = LENGTH) -> TapeRunner:
        return TapeRunner(VOCAB, 96, 4, length, noise=noise)

    return Engine(
        TapeRunner(VOCAB, blocks, block_size, LENGTH),
        decoder,
        eos=[EOS],
        drafters={
            "ngram": NgramDrafter(3, 1),
            "good": ModelDrafter(drafter_model(0.2)),
            "poor": ModelDrafter(drafter_model(2.0)),
            "sampled": ModelDrafter(drafter_model(0.5), draft_sampling=True),
            "short": ModelDrafter(drafter_model(0.2, length=16)),
            "ahead": AheadDrafter(drafter_model(0.2), passes=(9, 3, 1)),
            "ahead-sampled": AheadDrafter(drafter_model(0.5), draft_sampling=True),
        },
        options=EngineOptions(
            max_batch=max_batch,
            token_budget=budget,
            prefix_cache=prefix_cache,
            asynchronous=asynchronous,
            oracle=True,
        ),
        grammars=Cycles(VOCAB, EOS),  # type: ignore[arg-type]
        profile=profile,
    )


sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 24),
    stop=st.sampled_from([(), ("ab",), ("ca", "dda"), ("b",), ("漢a",)]),
    ignore_eos=st.booleans(),
)
constrained = st.builds(
    replace,
    sampling,
    min_tokens=st.sampled_from([0, 0, 1]),
    stop_token_ids=st.sampled_from([(), (2,)]),
    bad_words=st.sampled_from([(), ((1,), (2, 3)), ((0, 0, 4),)]),
    logit_bias=st.sampled_from([(), ((0, 1.5), (4, -100.0))]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.5]),
    logprobs=st.sampled_from([None, 0, 3]),
    prompt_logprobs=st.sampled_from([None, 0, 2]),
)
grammatical = st.builds(
    replace,
    constrained,
    grammar=st.sampled_from(["123", "04", "2"]).map(partial(Grammar, "regex")),
    ignore_eos=st.just(False),
)
plans = st.builds(
    SpeculationPlan,
    drafter=st.sampled_from([None, "ngram", "good", "poor", "sampled", "short", "ahead", "ahead-sampled"]),
    gamma=st.integers(0, 6),
    width=st.integers(1, 4),
)
prompts = st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=20).map(tuple)
requests = st.lists(
    st.builds(
        GenerateRequest,
        request_id=st.just("?"),
        prompt=prompts,
        sampling=sampling | constrained | grammatical,
        plan=plans,
        n=st.integers(1, 2),
        priority=st.integers(0, 2),
        tenant=st.sampled_from(["a", "b"]),
    ),
    min_size=1,
    max_size=5,
).map(lambda batch: [replace(request, request_id=str(i)) for i, request in enumerate(batch)])
sizes = st.fixed_dictionaries(
    {
        "blocks": st.integers(14, 40),
        "block_size": st.sampled_from([4, 7]),
        "max_batch": st.integers(1, 8),
        "budget": st.sampled_from([8, 24, 64]),
        "prefix_cache": st.booleans(),
        "asynchronous": st.booleans(),
    }
)


def plainly(request: GenerateRequest, decoder: TextDecoder = LETTERS) -> dict[tuple[str, int], Outcome]:
    """The same request alone, without a drafter, in an engine of its own."""
    return run(engine(decoder=decoder), [replace(request, plan=PLAIN)])


def same(found: Outcome, expected: Outcome) -> bool:
    def all_of(outcome: Outcome) -> tuple[object, ...]:
        return outcome.ids, outcome.text, outcome.finish, outcome.logprobs, outcome.prompt_logprobs

    return all_of(found) == all_of(expected)
