"""What fails takes one request with it, and neither its batch mates nor the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decoding import Cycle, Cycles, Driver, run
from support.tape import Letters, TapeRunner
from torch import Tensor

from gammaray.engine.batch import Row
from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.drafting import GuardedDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.errors import EngineFailure, InvalidRequest, Overloaded
from gammaray.types import GenerateRequest, Grammar, SamplingParams, SpeculationPlan

POISON = 6  # a token that only bad requests hold
SAMPLING = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Fragile(TapeRunner):
    """Fails when a row's prompt holds POISON, once it decodes at `at` tokens or more."""

    def __init__(self, at: int = 0, poison: float | None = None) -> None:
        super().__init__(8, blocks=128, max_model_len=64)
        self.at, self.poison = at, poison

    def forward(self, rows: Sequence[Row]) -> Tensor:
        logits = super().forward(rows)
        first = 0
        for row in rows:
            if self.sick(row):
                if self.poison is None:
                    raise RuntimeError("a device error that names no request")
                logits[first : first + row.wanted] = self.poison
            first += row.wanted
        return logits

    def sick(self, row: Row) -> bool:
        held = self.tape[row.blocks[0] * self.block_size][0] == POISON
        return held and row.start + len(row.pending) >= self.at

    def _logits(self, context: tuple[int, ...]) -> object:  # type: ignore[override]
        logits = super()._logits(context).copy()
        logits[POISON] = -50
        return logits


class WrongFirst(ModelDrafter):
    """Knows the target, and puts a wrong child before the right one: what is accepted has to move."""

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return super().begin([replace(view, width=1) for view in views])

    def collect(self, ticket: Ticket, deadline: float) -> dict[str, DraftTree]:
        chains = super().collect(ticket, deadline)
        return {
            rid: DraftTree(((tree.tokens[0] + 1) % 6, *tree.tokens), (-1, -1, *range(1, len(tree))))
            for rid, tree in chains.items()
        }


def engine(runner: TapeRunner, **options: int) -> Engine:
    drafters = {"ngram": NgramDrafter(3, 1)}
    return Engine(
        runner,
        Letters(),
        [7],
        drafters,
        EngineOptions(oracle=True, prefix_cache=False, **options),  # type: ignore[arg-type]
        grammars=Cycles(8, 7),  # type: ignore[arg-type]
    )


def request(rid: str, first: int, n: int = 1) -> GenerateRequest:
    return GenerateRequest(rid, (first, 2, 3, 1, 2), SAMPLING, SpeculationPlan("ngram", 3, 1), n)


@settings(max_examples=30)
@given(
    sick=st.lists(st.booleans(), min_size=1, max_size=6),
    n=st.integers(1, 2),
    at=st.sampled_from([0, 8, 12]),
    poison=st.sampled_from([None, math.nan, -math.inf, math.inf]),
)
def test_a_sick_request_fails_alone(sick: list[bool], n: int, at: int, poison: float | None) -> None:
    served = engine(Fragile(at, poison))
    batch = [request(str(i), POISON if bad else i % 6, n) for i, bad in enumerate(sick)]
    driver = Driver(served)
    driver.submit(batch)
    driver.finish(limit=400)
    for asked, bad in zip(batch, sick, strict=True):
        for index in range(n):
            found = driver.outcomes[asked.request_id, index]
            assert (found.finish == "error") == bad
            if not bad:
                assert found.ids == run(engine(Fragile()), [asked])[asked.request_id, index].ids
    assert served.cache.pool.used == 0
    assert run(served, [request("after", 1)])["after", 0].finish == "length"


def test_a_failure_that_only_the_batch_has_costs_no_request() -> None:
    class Small(TapeRunner):
        def forward(self, rows: Sequence[Row]) -> Tensor:
            if len(rows) > 1:
                raise MemoryError
            return super().forward(rows)

    batch = [request(str(i), i) for i in range(4)]
    found = run(engine(Small(8, 128, max_model_len=64)), batch)
    for asked in batch:
        alone = run(engine(TapeRunner(8, 128, max_model_len=64)), [asked])
        assert found[asked.request_id, 0].ids == alone[asked.request_id, 0].ids


def test_a_grammar_that_fails_fails_its_request() -> None:
    class Broken(Cycle):
        def advance(self, token: int) -> bool:
            if self.state == 3:
                raise RuntimeError("broken")
            return super().advance(token)

        def copy(self) -> Cycle:
            return Broken(self.word, self.vocab, self.eos)

    class Grammars(Cycles):
        def compile(self, grammar: Grammar) -> Cycle:
            return Broken([1, 2], self.vocab, self.eos)

    served = engine(TapeRunner(8, 128, max_model_len=64))
    served._grammars = Grammars(8, 7)  # type: ignore[assignment]
    bad = request("bad", 1)
    bad = replace(bad, sampling=replace(SAMPLING, grammar=Grammar("regex", "x"), ignore_eos=False))
    found = run(served, [bad, request("good", 2)])
    assert found["bad", 0].finish == "error"
    assert found["good", 0].finish == "length"
    assert served.cache.pool.used == 0


def test_constraints_that_leave_no_token_end_the_request_with_a_reason() -> None:
    served = engine(TapeRunner(8, 128, max_model_len=64))
    sampling = SamplingParams(max_tokens=9, grammar=Grammar("regex", "12"), bad_words=((1, 2),))
    served.submit(GenerateRequest("r", (1, 2, 3), sampling))
    chunks = [chunk for _ in range(3) for chunk in served.step().chunks]
    assert [i for chunk in chunks for i in chunk.ids] == [1]
    assert chunks[-1].finish == "error" and "bad_words" in (chunks[-1].error or "")


def test_nobody_waits_behind_a_full_queue() -> None:
    served = engine(TapeRunner(8, 128, max_model_len=64), max_batch=1, max_waiting=2)
    served.submit(request("a", 1, n=2))
    served.submit(request("b", 1))
    with pytest.raises(Overloaded):
        served.submit(request("c", 1))
    served.submit(replace(request("d", 1), generated=((1, 2),)))  # resumed: it had its place before
    while not served.idle:
        served.step()
    served.submit(request("c", 1))


def test_the_place_of_a_request_that_cannot_begin_is_free_again() -> None:
    served = engine(TapeRunner(8, 128, max_model_len=64), max_batch=1, max_waiting=1)

    def fail(ids: Sequence[int]) -> str:
        raise ValueError("no")

    served._intake._decoder = type("Failing", (), {"decode": staticmethod(fail)})()
    for rid in "abcd":
        served.submit(replace(request(rid, 1), generated=((1, 2),)))
        (chunk,) = served.step().chunks
        assert chunk.finish == "error"
    served._intake._decoder = Letters()
    served.submit(request("e", 1, n=2))


def test_more_sequences_than_there_are_places_are_a_bad_request() -> None:
    served = engine(TapeRunner(8, 128, max_model_len=64), max_batch=1, max_waiting=2)
    with pytest.raises(InvalidRequest, match="places"):
        served.submit(request("a", 1, n=4))


def test_nothing_delivered_yet_is_no_resumed_request() -> None:
    served = engine(TapeRunner(8, 128, max_model_len=64), max_batch=1, max_waiting=1)
    served.submit(request("a", 1, n=2))
    with pytest.raises(Overloaded):
        served.submit(replace(request("b", 1), generated=((),)))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_failed_move_changes_no_text(count: int, prefix_cache: bool) -> None:
    class FailsOnce(TapeRunner):
        failed = False

        def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
            if src and not self.failed:
                self.failed = True
                raise RuntimeError("no")
            super().move(src, dst)

    def asked(i: int) -> GenerateRequest:
        return replace(request(str(i), i), plan=SpeculationPlan("wrong first", 3, 2))

    def serve(runner: TapeRunner) -> Driver:
        served = engine(runner)
        served.cache.prefix_cache = prefix_cache
        served.drafters["wrong first"] = GuardedDrafter(
            "wrong first", WrongFirst(TapeRunner(8, 128, max_model_len=64))
        )
        driver = Driver(served)
        driver.submit(asked(i) for i in range(count))
        driver.finish()
        return driver

    runner = FailsOnce(8, 128, max_model_len=64)
    found, expected = serve(runner).outcomes, serve(TapeRunner(8, 128, max_model_len=64)).outcomes
    assert runner.failed
    for key, outcome in found.items():
        if outcome.finish == "error":
            assert count == 1 and expected[key].ids[: len(outcome.ids)] == outcome.ids
        else:
            assert outcome.ids == expected[key].ids


def test_a_grammar_that_gives_up_while_verifying_fails_its_request_alone() -> None:
    class GivesUp(Cycle):
        def mask(self) -> Tensor:
            if self.state >= 2:
                raise EngineFailure("too complex")
            return super().mask()

        def copy(self) -> Cycle:
            return GivesUp(self.word, self.vocab, self.eos)

    class Grammars(Cycles):
        def compile(self, grammar: Grammar) -> Cycle:
            return GivesUp([1, 2], self.vocab, self.eos)

    served = engine(TapeRunner(8, 128, max_model_len=64))
    served._grammars = Grammars(8, 7)  # type: ignore[assignment]
    bad = replace(
        request("bad", 1), sampling=replace(SAMPLING, grammar=Grammar("regex", "x"), ignore_eos=False)
    )
    driver = Driver(served)
    driver.submit([bad, request("good", 2)])
    driver.finish()
    assert driver.outcomes["bad", 0].finish == "error"
    assert driver.outcomes["good", 0].finish == "length"
    assert not any(sequence.preemptions for sequence in served.scheduler)


def test_what_is_more_urgent_runs_first_within_its_tenant() -> None:
    served = engine(TapeRunner(8, 128, max_model_len=64), max_batch=1)
    driver = Driver(served)
    order = [("a", "x", 0), ("b", "x", 5), ("c", "x", -1), ("d", "y", 9), ("e", "x", 5)]
    driver.submit(
        replace(request(rid, 1), tenant=tenant, priority=priority) for rid, tenant, priority in order
    )
    ended: list[str] = []
    while not served.idle:
        ended += [chunk.request_id for chunk in served.step().chunks if chunk.finish]
    assert [rid for rid in ended if rid != "d"] == ["c", "a", "b", "e"]
    assert ended.index("d") == 1, "the other tenant's turn does not depend on its priorities"


def test_the_least_urgent_of_a_tenant_makes_way() -> None:
    served = engine(TapeRunner(8, 14, max_model_len=48))
    batch = [replace(request(str(i), i), priority=priority) for i, priority in enumerate((3, 0, 1))]
    batch = [replace(asked, sampling=replace(SAMPLING, max_tokens=20)) for asked in batch]
    driver = Driver(served)
    driver.submit(batch)
    preempted: set[str] = set()
    while not served.idle:
        driver.step()
        preempted |= {s.request.request_id for s in served.scheduler if s.preemptions}
    assert preempted == {"0"}
    assert all(outcome.finish == "length" for outcome in driver.outcomes.values())
