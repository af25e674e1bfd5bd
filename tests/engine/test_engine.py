"""What one engine does step by step: ends inside a block, fairness, chunked prefill, KV, errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch
from support.decoding import Driver, Foresight, run
from support.tape import Letters, TapeRunner

from gammaray.engine.drafters.base import Drafter, DraftTree, Ticket
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.drafting import well_formed
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.sequence import State
from gammaray.errors import InvalidRequest
from gammaray.types import PLAIN, GenerateRequest, KeyPolicy, PolicySnapshot, SamplingParams, SpeculationPlan

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
CHAIN = SpeculationPlan("oracle", 6, 1)


def engine(drafter: Drafter | None = None, eos: Sequence[int] = (), vocab: int = 8, **options: int) -> Engine:
    settings = {"max_batch": 8, "token_budget": 64, **options}
    drafters = {"ngram": NgramDrafter(3, 1), **({"oracle": drafter} if drafter else {})}
    return Engine(
        TapeRunner(vocab, blocks=64, max_model_len=96),
        Letters(),
        eos,
        drafters,
        EngineOptions(oracle=True, **settings),
    )


def request(rid: str = "r", prompt: Sequence[int] = (1, 2, 3), **changes: object) -> GenerateRequest:
    return replace(GenerateRequest(rid, tuple(prompt), GREEDY), **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def script() -> list[int]:
    """Prompt and 12 greedy tokens."""
    (outcome,) = run(engine(), [request()]).values()
    return [1, 2, 3, *outcome.ids]


def test_the_first_token_comes_from_the_prefill_and_each_round_adds_a_block(script: list[int]) -> None:
    driver = Driver(engine(Foresight(script)))
    driver.submit([request(plan=CHAIN)])
    lengths = []
    while not driver.engine.idle:
        driver.step()
        lengths.append(len(driver.outcomes["r", 0].ids))
    assert lengths == [1, 8, 12]  # prefill; 6 accepted + bonus; 3 accepted + bonus, capped by max_tokens


def test_max_tokens_is_exact_inside_a_block(script: list[int]) -> None:
    for limit in range(1, 12):
        sampling = replace(GREEDY, max_tokens=limit)
        (outcome,) = run(engine(Foresight(script)), [request(plan=CHAIN, sampling=sampling)]).values()
        assert (outcome.ids, outcome.finish) == (script[3 : 3 + limit], "length")


def test_eos_inside_an_accepted_block_ends_the_sequence(script: list[int]) -> None:
    """sglang#31599 and vllm#56137: what lies behind EOS is neither delivered nor counted as accepted."""
    eos = script[7]
    first = script[3:].index(eos)  # generated tokens before it
    (outcome,) = run(engine(Foresight(script), eos=[eos]), [request(plan=CHAIN)]).values()
    assert outcome.finish == "stop"
    assert outcome.ids == script[3 : 3 + first + 1]
    assert outcome.text == Letters().decode(outcome.ids[:-1])
    assert outcome.stats is not None
    assert outcome.stats.accepted == first  # the prefill's token is no draft, EOS is one
    assert outcome.stats.tau == first


def test_stop_wins_over_length_when_both_end_at_one_token(script: list[int]) -> None:
    text = Letters().decode(script[3:6])
    sampling = replace(GREEDY, max_tokens=3, stop=(text[-1],))
    (outcome,) = run(engine(Foresight(script)), [request(plan=CHAIN, sampling=sampling)]).values()
    assert outcome.finish == "stop"
    assert outcome.text == text[: text.index(text[-1])]


def test_an_aborted_request_ends_at_the_next_step_and_gives_its_blocks_back() -> None:
    driver = Driver(engine())
    driver.submit([request("a"), request("b")])
    driver.step()
    driver.engine.abort("a")
    driver.finish()
    assert driver.outcomes["a", 0].finish == "abort"
    assert driver.outcomes["b", 0].finish == "length"
    assert driver.engine.cache.pool.used == 0


def test_aborting_what_is_not_there_is_ignored() -> None:
    served = engine()
    served.abort("nobody")
    assert served.step().chunks == []


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    driver = Driver(engine(max_batch=4, token_budget=8))
    driver.submit([request("short")])
    driver.step()
    driver.submit([request("long", prompt=[1, 2, 3, 4, 5] * 8)])
    growth = []
    while "long" not in {rid for rid, _ in driver.outcomes}:
        before = len(driver.outcomes["short", 0].ids)
        driver.step()
        growth.append(len(driver.outcomes["short", 0].ids) - before)
    assert len(growth) > 4
    assert set(growth) == {1}


def test_waiting_tenants_take_turns() -> None:
    driver = Driver(engine(max_batch=1))
    driver.submit(request(f"a{i}", tenant="a") for i in range(3))
    driver.submit([request("b0", tenant="b")])
    driver.finish()
    order = [rid for rid, _ in driver.outcomes]
    assert order.index("b0") == 1


def test_sequences_of_one_request_share_the_prompt(script: list[int]) -> None:
    prompt = [1, 2, 3, 4] * 6
    driver = Driver(engine())
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=6)
    driver.submit([request(prompt=prompt, n=3, sampling=sampling)])
    driver.finish()
    assert sum(report.prefill_tokens for report in driver.reports) < 2 * len(prompt)
    texts = {outcome.text for outcome in driver.outcomes.values()}
    assert len(driver.outcomes) == 3
    assert len(texts) > 1  # each sequence has noise of its own


def test_a_second_prompt_reports_its_cached_tokens() -> None:
    served = engine()
    prompt = [1, 2, 3, 4] * 4
    run(served, [request(prompt=prompt)])
    served.submit(request(prompt=prompt))
    chunks = []
    while not served.idle:
        chunks += served.step().chunks
    assert chunks[-1].cached_tokens == 12  # all full blocks but the one of the last token


def test_tenants_do_not_share_a_prefix() -> None:
    served = engine()
    prompt = [1, 2, 3, 4] * 4
    run(served, [request(prompt=prompt, tenant="a")])
    served.submit(request(prompt=prompt, tenant="b"))
    chunks = []
    while not served.idle:
        chunks += served.step().chunks
    assert chunks[-1].cached_tokens == 0


def test_a_policy_narrows_gamma_from_the_next_step_on(script: list[int]) -> None:
    served = engine(Foresight(script))
    served.apply(PolicySnapshot(version=1, keys={("default", "default", "oracle"): KeyPolicy(gamma=1)}))
    (outcome,) = run(served, [request(plan=CHAIN)]).values()
    assert outcome.stats is not None
    assert outcome.stats.lengths == (0, 1, 5)  # two tokens a round, at most one of them drafted
    assert outcome.ids == script[3:]


def test_the_kill_switch_leaves_plain_decoding(script: list[int]) -> None:
    served = engine(Foresight(script))
    served.apply(PolicySnapshot(version=1, speculation=False))
    (outcome,) = run(served, [request(plan=CHAIN)]).values()
    assert outcome.stats is not None
    assert (outcome.stats.drafted, outcome.stats.rounds) == (0, 11)


def test_drafts_leave_30_percent_of_the_budget_to_plain_decoding(script: list[int]) -> None:
    driver = Driver(engine(Foresight(script), max_batch=8, token_budget=50))
    driver.submit(request(str(i), plan=CHAIN) for i in range(8))
    driver.finish()
    assert (
        max(report.verified_nodes for report in driver.reports) == 32
    )  # 48 wanted, 35 allowed, equal depths


def test_a_report_counts_by_tenant_class_and_drafter(script: list[int]) -> None:
    driver = Driver(engine(Foresight(script)))
    driver.submit([request(plan=CHAIN, tenant="t", request_class="code"), request("p", plan=PLAIN)])
    driver.finish()
    totals: dict[tuple[str, str | None], int] = {}
    for report in driver.reports:
        for count in report.counts:
            key = (count.tenant, count.drafter)
            totals[key] = totals.get(key, 0) + count.stats.emitted
    assert totals == {("t", "oracle"): 11, ("default", None): 11}


def sampled(ids: list[list[int]], probs: list[list[float]]) -> DraftTree:
    return DraftTree((1,), (-1,), "iid", torch.tensor(ids), torch.tensor(probs))


def test_q_may_be_padded_with_any_token() -> None:
    assert well_formed(sampled([[1, 2, 1, 1]], [[0.4, 0.6, 0.0, 0.0]]), 4, 1, 8)


BROKEN = {
    "a parent that comes later": DraftTree((1, 2), (1, -1)),
    "deeper than asked": DraftTree((1,) * 7, tuple(range(-1, 6))),
    "more nodes than there is room for": DraftTree((1,) * 7, (-1,) * 7),
    "no parent for a token": DraftTree((1, 2), (-1,)),
    "a token outside the vocabulary": DraftTree((99,), (-1,)),
    "a negative token": DraftTree((-1,), (-1,)),
    "a token twice in q": sampled([[1, 1, 2]], [[0.3, 0.3, 0.4]]),
    "a q that is none": sampled([[1, 2]], [[0.3, 0.3]]),
    "no tree at all, nor true or false": cast(DraftTree, torch.ones(3)),
}


@pytest.mark.parametrize("tree", BROKEN.values(), ids=BROKEN.keys())
def test_a_malformed_draft_is_dropped(tree: DraftTree, script: list[int]) -> None:
    class Malformed(Foresight):
        def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
            return {view.rid: tree for view in ticket.views}

    (outcome,) = run(engine(Malformed(script)), [request(plan=CHAIN)]).values()
    assert outcome.ids == script[3:]
    assert outcome.stats is not None
    assert outcome.stats.drafted == 0


BAD = {
    "empty": ({"prompt": ()}, "prompt"),
    "outside the vocabulary": ({"prompt": (1, 8)}, "prompt"),
    "negative id": ({"prompt": (-1,)}, "prompt"),
    "too long": ({"prompt": (1,) * 90}, "max_tokens"),
    "unknown drafter": ({"plan": SpeculationPlan("nobody", 2)}, "speculation.drafter"),
    "no sequence": ({"n": 0}, "n"),
    "no tokens": ({"sampling": replace(GREEDY, max_tokens=0)}, "max_tokens"),
    "negative temperature": ({"sampling": replace(GREEDY, temperature=-1.0)}, "temperature"),
    "no temperature": ({"sampling": replace(GREEDY, temperature=float("nan"))}, "temperature"),
    "top_p of nothing": ({"sampling": replace(GREEDY, top_p=0.0)}, "top_p"),
    "min_p over 1": ({"sampling": replace(GREEDY, min_p=1.5)}, "min_p"),
    "resumed with another n": ({"generated": ((1,), (2,))}, "generated"),
    "resumed outside the vocabulary": ({"generated": ((8,),)}, "generated"),
    "resumed beyond max_tokens": ({"generated": ((1,) * 13,)}, "generated"),
    "too many nodes": ({"plan": SpeculationPlan("ngram", 16, 8)}, "speculation.gamma"),
}


@pytest.mark.parametrize("changes, param", BAD.values(), ids=BAD.keys())
def test_a_request_that_can_never_run_is_refused_at_once(changes: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine().submit(request(**changes))
    assert caught.value.param == param


def test_a_prompt_that_fills_the_model_to_the_last_token_runs() -> None:
    (outcome,) = run(engine(), [request(prompt=[1, 2, 3] * 28, plan=SpeculationPlan("ngram", 8, 4))]).values()
    assert len(outcome.ids) == 12


def test_a_failed_step_ends_every_request_and_leaves_a_working_engine() -> None:
    served = engine()
    driver = Driver(served)
    driver.submit([request("a"), request("b")])
    driver.step()
    chunks = served.fail_all("out of luck")
    assert {(chunk.finish, chunk.error) for chunk in chunks} == {("error", "out of luck")}
    assert served.cache.pool.used == 0
    (outcome,) = run(served, [request("c")]).values()
    assert outcome.finish == "length"


def test_an_id_that_runs_is_refused_and_free_again_afterwards() -> None:
    served = engine()
    served.submit(request())
    with pytest.raises(InvalidRequest, match="in use"):
        served.submit(request())
    run(served, [request("other")])
    assert run(served, [request()])


def test_siblings_of_a_leader_that_never_ran_still_run() -> None:
    driver = Driver(engine(max_batch=1, token_budget=8))
    driver.submit([request(prompt=[1, 2, 3] * 10, n=3)])
    driver.step()
    leader = driver.engine.scheduler.running[0]
    driver.engine._finish(leader, "abort")
    driver.finish()
    assert [driver.outcomes["r", i].finish for i in range(3)] == ["abort", "length", "length"]


def test_a_preempted_sequence_gives_its_drafter_state_back() -> None:
    drafter = NgramDrafter(2, 1)
    served = Engine(
        TapeRunner(8, blocks=16, max_model_len=40),
        Letters(),
        drafters={"ngram": drafter},
        options=EngineOptions(oracle=True, prefix_cache=False),
    )
    driver = Driver(served)
    sampling = replace(GREEDY, max_tokens=30)
    plan = SpeculationPlan("ngram", 3)
    driver.submit(request(str(i), prompt=[1, 2, i], plan=plan, sampling=sampling) for i in range(4))
    evicted = 0
    while not served.idle:
        driver.step()
        waiting = [sequence for sequence in served.scheduler if sequence.state is State.WAITING]
        evicted += len(waiting)
        assert [drafter.length(sequence.rid) for sequence in waiting] == [None] * len(waiting)
    assert evicted > 0


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    driver = Driver(engine())
    driver.submit([request(prompt=[1, 2, 3] * 4)])
    for _ in range(3):
        driver.step()
    (sequence,) = driver.engine.scheduler.running
    driver.engine.scheduler._preempt(sequence)
    driver.finish()
    assert sequence.preemptions == 1
    assert sequence.cached_tokens == 0


def test_an_aborted_stream_ends_before_what_may_begin_a_stop_string(script: list[int]) -> None:
    """Else a re-run from what was delivered would begin inside the stop string."""
    text = Letters().decode(script[3:8])
    served = engine()
    served.submit(request(sampling=replace(GREEDY, stop=(text[2:4] + "?",))))
    chunks = []
    while "".join(chunk.text for chunk in chunks) != text[:2]:
        chunks += served.step().chunks
    served.step()
    served.abort("r")
    chunks += served.step().chunks
    assert "".join(chunk.text for chunk in chunks) == text[:2]


def test_a_decoder_that_fails_ends_its_requests_and_not_the_engine() -> None:
    served = engine()
    driver = Driver(served)
    driver.submit([request("a")])
    driver.step()

    def fail(ids: Sequence[int]) -> str:
        raise ValueError("no")

    served.scheduler.running[0].output._decoder = type("Failing", (), {"decode": staticmethod(fail)})()
    driver.submit([request("b")])
    driver.finish()
    assert driver.outcomes["a", 0].finish == "error"
    assert driver.outcomes["b", 0].finish == "length"


@pytest.mark.parametrize("ended", ["eos", "stop", "length"])
def test_a_resumed_sequence_that_had_ended_ends_at_once(ended: str, script: list[int]) -> None:
    have = tuple(script[3:7])
    sampling = replace(GREEDY, max_tokens=4 if ended == "length" else 12)
    if ended == "stop":
        sampling = replace(sampling, stop=(Letters().decode(have[-1:]),))
    served = engine(eos=[have[-1]] if ended == "eos" else [])
    served.submit(request(sampling=sampling, generated=(have,)))
    (chunk,) = served.step().chunks
    assert chunk.finish == ("length" if ended == "length" else "stop")
    assert (chunk.ids, chunk.text) == ((), "")


def test_a_decoder_that_fails_at_the_very_end_still_ends_the_request() -> None:
    served = engine()
    driver = Driver(served)
    driver.submit([request(sampling=replace(GREEDY, max_tokens=2))])
    driver.step()
    output = served.scheduler.running[0].output
    take = output.take

    def fail(final: bool) -> tuple[list[int], str]:
        output.take = take  # type: ignore[method-assign]
        raise ValueError("no")

    output.take = fail  # type: ignore[method-assign]
    driver.step()
    assert driver.outcomes["r", 0].finish == "error"
    assert served.idle
