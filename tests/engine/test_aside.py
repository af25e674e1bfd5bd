"""A drafter on a thread of its own: the same drafts, at work while the target verifies.

The streams are not there; `Sides` checks that the moments at which they meet are passed on, in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decoding import Driver, run
from support.lossless import engine, plainly, requests, same
from torch import Tensor

from gammaray.engine.drafters.aside import AsideDrafter
from gammaray.engine.drafters.base import DraftTree, Ticket
from gammaray.types import GenerateRequest, SamplingParams, SpeculationPlan

T = TypeVar("T")


class Sides:
    """Two streams that are none. Moments are numbers."""

    def __init__(self) -> None:
        self.departed = self.done = 0
        self.arrived = set[object]()
        self.threads = set[int]()
        self.crossed = 0

    def depart(self) -> object:
        self.departed += 1
        return self.departed

    def work(self, moment: object, call: Callable[[], T]) -> tuple[T, object]:
        self.done += 1
        assert moment == self.done  # in the order in which they were begun
        self.threads.add(threading.get_ident())
        return call(), self.done

    def arrive(self, moment: object, results: Sequence[Tensor]) -> None:
        assert moment not in self.arrived
        self.arrived.add(moment)
        self.crossed += len(results)


def aside(served: object, *names: str) -> list[Sides]:
    sides = [Sides() for _ in names]
    for name, side in zip(names, sides, strict=True):
        guarded = served.drafters[name]  # type: ignore[attr-defined]
        guarded.inner = AsideDrafter(guarded.inner, side)
    return sides


@settings(max_examples=40)
@given(
    batch=requests, aborted=st.sets(st.integers(0, 4)), at=st.integers(1, 8), blocks=st.sampled_from([16, 40])
)
def test_drafting_on_a_thread_changes_no_text(
    batch: list[GenerateRequest], aborted: set[int], at: int, blocks: int
) -> None:
    """Catches a call to the drafter that comes between those of the draft it is making."""
    served = engine(blocks=blocks, asynchronous=True)
    sides = aside(served, "good", "sampled", "short")
    driver = Driver(served)
    driver.submit(batch)
    for _ in range(at):
        if not served.idle:
            driver.step()
    for request in aborted:
        served.abort(str(request))
    driver.finish()
    for request in batch:
        for key, expected in plainly(request).items():
            found = driver.outcomes[key]
            cut = found.finish == "abort" and expected.ids[: len(found.ids)] == found.ids
            assert cut or same(found, expected)
    assert served.cache.pool.used == 0
    served._collect()  # of what was aborted
    for name, side in zip(("good", "sampled", "short"), sides, strict=True):
        assert served.drafters[name].inner._inner.cache.pool.used == 0
        assert side.departed == side.done == len(side.arrived) and len(side.threads) <= 1
        assert threading.get_ident() not in side.threads


def asked(drafter: str, rid: str = "r") -> GenerateRequest:
    sampling = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
    return GenerateRequest(rid, (1, 2, 3, 1, 2), sampling, SpeculationPlan(drafter, 4))


def test_a_draft_is_made_while_the_target_computes() -> None:
    """Catches a drafter that begins when it is asked for the result: it would wait for ever here."""
    served = engine(asynchronous=True)
    aside(served, "good")
    inner = served.drafters["good"].inner._inner
    collect, forward = inner.collect, served.runner.forward
    drafting, verified = threading.Event(), threading.Event()
    met = 0

    def slowly(ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        drafting.set()
        assert verified.wait(30)
        return collect(ticket, deadline)

    def watched(rows: Sequence[object]) -> Tensor:
        nonlocal met
        if served._asked.tickets:
            assert drafting.wait(30)
            drafting.clear()
            met += 1
        result = forward(rows)
        verified.set()
        return result

    inner.collect = slowly
    served.runner.forward = watched  # type: ignore[method-assign,assignment]
    outcomes = run(served, [asked("good", "a"), asked("good", "b")])
    expected = plainly(asked("good", "a"))["a", 0]
    assert same(outcomes["a", 0], expected) and met > 3


def test_what_was_drawn_crosses_over() -> None:
    """Catches q whose memory the drafter's stream may use again while the target's still reads it."""
    served = engine(asynchronous=True)
    (side,) = aside(served, "sampled")
    (outcome,) = run(served, [asked("sampled")]).values()
    assert outcome.stats is not None and outcome.stats.accepted > 0
    assert side.crossed > 0 and side.crossed % 2 == 0


def test_a_failure_on_the_thread_costs_a_draft() -> None:
    served = engine(asynchronous=True)
    aside(served, "good")

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    served.drafters["good"].inner._inner.collect = fail
    driver = Driver(served)
    driver.submit([asked("good")])
    driver.finish()
    assert same(driver.outcomes["r", 0], plainly(asked("good"))["r", 0])
    assert sum(report.drafter_failures for report in driver.reports) > 3
    assert driver.outcomes["r", 0].stats is not None
    assert driver.reports[-1].finished[0].fallback == "oom"


@pytest.mark.parametrize("name", ["good", "sampled"])
def test_alone_it_drafts_what_it_drafts_here(name: str) -> None:
    here, there = engine(asynchronous=True), engine(asynchronous=True)
    aside(there, name)
    found, expected = (run(one, [asked(name)])["r", 0] for one in (there, here))
    assert found.stats == expected.stats and same(found, expected)
