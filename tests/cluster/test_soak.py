"""A minute of streams under random kills; benchmarks/soak.py takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from clients.chaos_stream import Choice, Heard
from support.decoding import Outcome
from support.soak import soak
from support.soak_killer import BAG
from support.soak_streams import Case, Tally

SECONDS, SEED = 60.0, 1
CASE = Case("bank", {}, [Outcome([0, 1, 2, 1], "abcb", "length"), Outcome([3], "d", "stop")])
TWO = {0: Choice("abcb", "length"), 1: Choice("d", "stop")}
USAGE = {"completion_tokens": 5}


@pytest.mark.parametrize(
    ("heard", "counts"),
    [
        (Heard(choices=TWO, usage=USAGE, done=True), (1, 0, 0, 0)),
        (Heard(choices={0: Choice("ab")}, left=True), (0, 1, 0, 0)),
        (Heard(status=503, error={"message": "busy"}), (0, 0, 1, 0)),
        (Heard(choices={0: Choice("ac")}, left=True), (0, 0, 0, 1)),
        (Heard(choices={**TWO, 0: Choice("abcbb", "length")}, usage=USAGE, done=True), (0, 0, 0, 1)),
        (Heard(choices={**TWO, 0: Choice("abc", "length")}, usage=USAGE, done=True), (0, 0, 0, 1)),
        (Heard(choices={**TWO, 0: Choice("abcb", "stop")}, usage=USAGE, done=True), (0, 0, 0, 1)),
        (Heard(choices={0: TWO[0]}, usage=USAGE, done=True), (0, 0, 0, 1)),
        (Heard(choices=TWO, usage=USAGE), (0, 0, 0, 1)),
        (Heard(choices=TWO, usage={"completion_tokens": 6}, done=True), (0, 0, 0, 1)),
        (Heard(choices=TWO, usage=USAGE, done=True, fault="an event behind the last one"), (0, 0, 0, 1)),
    ],
)
def test_streams_are_judged(heard: Heard, counts: tuple[int, ...]) -> None:
    tally = Tally()
    tally.add(CASE, heard)
    assert (tally.whole, tally.left, len(tally.refused), len(tally.faults)) == counts


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # in Ray itself
def test_streams_say_what_they_should_whatever_is_killed(tmp_path: Path) -> None:
    import ray

    assert not ray.is_initialized(), "another cluster's fixture is still there"
    result = soak(SECONDS, SEED, tmp_path)
    tally = result.tally
    assert not tally.faults, "\n".join(tally.faults)
    assert not tally.refused, "\n".join(tally.refused)
    assert not result.leaks, "\n".join(result.leaks)
    # and it was not an idle minute:
    assert result.kills.keys() == BAG.keys()
    assert tally.whole > 20 and tally.left > 0
    assert 0 < result.hits < result.drafts
