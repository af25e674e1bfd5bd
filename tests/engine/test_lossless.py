"""Speculative = plain, token for token, whatever is drafted and whoever shares the batch.

Coupled verification on a model whose output depends on every slot of its KV (support/tape.py), with the state
oracle on. The reference is the same request alone, without a drafter, in an engine of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decoding import Driver, Outcome, run
from support.tape import Letters, Pieces, TapeRunner

from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.text import TextDecoder
from gammaray.types import PLAIN, GenerateRequest, PolicySnapshot, SamplingParams, SpeculationPlan

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
) -> Engine:
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
        },
        options=EngineOptions(
            max_batch=max_batch, token_budget=budget, prefix_cache=prefix_cache, oracle=True
        ),
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
plans = st.builds(
    SpeculationPlan,
    drafter=st.sampled_from([None, "ngram", "good", "poor", "sampled", "short"]),
    gamma=st.integers(0, 6),
    width=st.integers(1, 4),
)
prompts = st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=20).map(tuple)
requests = st.lists(
    st.builds(
        GenerateRequest,
        request_id=st.just("?"),
        prompt=prompts,
        sampling=sampling,
        plan=plans,
        n=st.integers(1, 2),
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
    }
)


def plainly(request: GenerateRequest, decoder: TextDecoder = LETTERS) -> dict[tuple[str, int], Outcome]:
    return run(engine(decoder=decoder), [replace(request, plan=PLAIN)])


def same(found: Outcome, expected: Outcome) -> bool:
    return (found.ids, found.text, found.finish) == (expected.ids, expected.text, expected.finish)


@settings(max_examples=150)
@given(batch=requests, size=sizes, decoder=st.sampled_from([LETTERS, SPLIT]))
def test_a_batch_of_everything_equals_plain_decoding(
    batch: list[GenerateRequest], size: dict[str, int], decoder: TextDecoder
) -> None:
    """Drafters, trees, chains, plain, n = 2, tenants, block sizes, chunked prefill and preemption, mixed."""
    served = engine(**size, decoder=decoder)
    outcomes = run(served, batch)
    for request in batch:
        for key, expected in plainly(request, decoder).items():
            assert same(outcomes[key], expected), (request, outcomes[key], expected)
    assert served.cache.pool.used == 0
    for name in ("good", "poor", "sampled", "short"):
        assert served.drafters[name].inner.cache.pool.used == 0


@settings(max_examples=60)
@given(batch=requests, aborted=st.sets(st.integers(0, 4)), at=st.integers(0, 12), off=st.integers(0, 12))
def test_aborts_and_switching_speculation_off_and_on_change_no_text(
    batch: list[GenerateRequest], aborted: set[int], at: int, off: int
) -> None:
    served = engine(blocks=24)
    driver = Driver(served)
    driver.submit(batch)
    for step in range(40):
        if step == at:
            for request in aborted:
                served.abort(str(request))
        if step in (off, off + 4):
            served.apply(PolicySnapshot(version=step, speculation=step != off))
        if not served.idle:
            driver.step()
    driver.finish()
    for request in batch:
        for key, expected in plainly(request).items():
            found = driver.outcomes[key]
            if found.finish == "abort":
                assert int(request.request_id) in aborted
                assert expected.ids[: len(found.ids)] == found.ids
            else:
                assert same(found, expected)
    assert served.cache.pool.used == 0


def speculative(drafter: str, gamma: int = 4, width: int = 1, **sampling: object) -> GenerateRequest:
    params = SamplingParams(max_tokens=24, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return GenerateRequest("r", (1, 2, 3, 1, 2), params, SpeculationPlan(drafter, gamma, width))


@pytest.mark.parametrize("drafter", ["ngram", "good", "sampled"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_really_accepted(drafter: str, width: int, temperature: float) -> None:
    """Equality alone would also hold if every draft were thrown away."""
    request = speculative(drafter, width=width, temperature=temperature, seed=3)
    (outcome,) = run(engine(), [request]).values()
    assert outcome.stats is not None
    assert outcome.stats.accepted > 0
    assert outcome.stats.emitted == sum(k * count for k, count in enumerate(outcome.stats.lengths)) == 23


def test_a_resumed_request_goes_on_with_the_same_text() -> None:
    whole = speculative("good", temperature=1.0, seed=7)
    (expected,) = run(engine(), [whole]).values()
    resumed = replace(whole, generated=(tuple(expected.ids[:9]),))
    chunks = []
    served = engine()
    served.submit(resumed)
    while not served.idle:
        chunks += served.step().chunks
    assert chunks[0].first_position == 9
    assert [i for chunk in chunks for i in chunk.ids] == expected.ids[9:]


def test_a_preempted_sequence_is_not_noticed_from_outside() -> None:
    batch = [replace(speculative("good", temperature=1.0, seed=i), request_id=str(i)) for i in range(4)]
    driver = Driver(engine(blocks=16, prefix_cache=False))
    driver.submit(batch)
    driver.finish()
    assert sum(report.preempted for report in driver.reports) > 0
    for request in batch:
        assert same(driver.outcomes[request.request_id, 0], plainly(request)[request.request_id, 0])


def test_a_drafter_that_fails_costs_only_speed() -> None:
    class Broken(NgramDrafter):
        def collect(self, ticket: object, deadline: float) -> dict[str, object]:  # type: ignore[override]
            raise RuntimeError("no draft today")

    served = engine()
    served.drafters["ngram"].inner = Broken()
    request = speculative("ngram", temperature=0.0)
    (outcome,) = run(served, [request]).values()
    assert same(outcome, plainly(request)["r", 0])
    assert outcome.stats is not None
    assert outcome.stats.drafted == 0
