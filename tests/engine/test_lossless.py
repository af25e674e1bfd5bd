"""Speculative = plain, token for token, whatever is drafted and whoever shares the batch.

Coupled verification on a model whose output depends on every slot of its KV (support/tape.py), with the state
oracle on. The reference is the same request alone, without a drafter, in an engine of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decoding import Driver, run
from support.lossless import LETTERS, SPLIT, VOCAB, engine, plainly, requests, same, sizes

from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.text import TextDecoder
from gammaray.types import GenerateRequest, Grammar, PolicySnapshot, SamplingParams, SpeculationPlan


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
@given(
    batch=requests,
    aborted=st.sets(st.integers(0, 4)),
    at=st.integers(0, 12),
    off=st.integers(0, 12),
    asynchronous=st.booleans(),
)
def test_aborts_and_switching_speculation_off_and_on_change_no_text(
    batch: list[GenerateRequest], aborted: set[int], at: int, off: int, asynchronous: bool
) -> None:
    served = engine(blocks=24, asynchronous=asynchronous)
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


SINGLE = {
    "min_tokens": {"min_tokens": 20},
    "stop_token_ids": {"stop_token_ids": (5,)},
    "bad_words": {"bad_words": ((2, 3), (1,))},
    "logit_bias": {"logit_bias": ((0, 2.0), (3, -100.0))},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "grammar": {"grammar": Grammar("regex", "0123")},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 3},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SINGLE)
def test_each_parameter_alone_does_something_and_speculates_like_plain(name: str, temperature: float) -> None:
    plain_only = {
        "max_tokens": 24,
        "temperature": temperature,
        "ignore_eos": name not in ("grammar", "min_tokens"),
    }
    accepted, changed = 0, False
    for seed in range(6):
        without = SamplingParams(**plain_only, seed=seed)  # type: ignore[arg-type]
        sampling = replace(without, **SINGLE[name])
        for drafter, width in (("good", 1), ("good", 3), ("ngram", 1), ("sampled", 2)):
            prompt = (seed % 5, 2, 3, 1, 2)
            asked = GenerateRequest("r", prompt, sampling, SpeculationPlan(drafter, 4, width))
            (found,) = run(engine(), [asked]).values()
            expected = plainly(asked)["r", 0]
            assert same(found, expected)
            assert found.stats is not None
            accepted += found.stats.accepted
        base = plainly(replace(asked, sampling=without))["r", 0]
        changed |= not same(expected, base)
    assert changed and accepted > 0


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    """At every position, also where penalties and a mask decided (B8: 0.0 for drafted tokens)."""
    sampling = SamplingParams(
        temperature=0.7, seed=3, max_tokens=20, ignore_eos=True, frequency_penalty=0.5, top_k=2,
        bad_words=((1,),), logprobs=2, prompt_logprobs=1,
    )  # fmt: skip
    asked = GenerateRequest("r", (1, 2, 3, 1, 2), sampling, SpeculationPlan("good", 4, 2))
    served = engine()
    (found,) = run(served, [asked]).values()
    tokens = [*asked.prompt, *found.ids]
    logits, _ = served.runner.dense(tokens)
    raw = logits.log_softmax(-1)
    assert found.stats is not None and found.stats.accepted > 3
    assert found.prompt_logprobs[0] is None
    everything = [*found.prompt_logprobs[1:], *found.logprobs]
    for position, entry in enumerate(everything, 1):
        assert entry is not None
        row = raw[position - 1].tolist()
        assert entry.logprob == pytest.approx(row[tokens[position]], abs=1e-5)
        best = sorted(range(VOCAB), key=lambda token: -row[token])
        assert [token for token, _ in entry.top] == best[: len(entry.top)]
    assert [len(entry.top) for entry in everything if entry] == [1] * 4 + [2] * 20


@pytest.mark.parametrize("cached", [False, True])
def test_prompt_log_probabilities_are_whole_whatever_was_cached_or_preempted(cached: bool) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    asked = GenerateRequest("r", (1, 2, 3, 1, 2, 0, 4, 1, 2, 3, 0, 0, 1), sampling)
    expected = plainly(asked)["r", 0]
    assert len(expected.prompt_logprobs) == len(asked.prompt)
    served = engine(blocks=16, budget=8)
    driver = Driver(served)
    if cached:
        driver.submit([replace(asked, request_id="before", sampling=replace(sampling, prompt_logprobs=None))])
        driver.finish()
    driver.submit([replace(asked, n=2)])
    driver.step()
    for sequence in list(served.scheduler.running):  # in the middle of its prompt
        served.scheduler._preempt(sequence)
    driver.finish()
    assert same(driver.outcomes["r", 0], expected)
    assert driver.outcomes["r", 1].prompt_logprobs == ()
