"""One sentence for a slow request: the reason that its numbers give."""

from __future__ import annotations

from typing import Any

import pytest
from support.finished import ORDINARY, finished

from gammaray.routing.diagnosis import Usual, diagnose, usual
from gammaray.routing.window import Phases
from gammaray.types import Finished, SpeculationStats

FLEET = usual([ORDINARY] * 9)  # 0.01 s queued, 0.1 s prefill, 20 rounds of 30 ms and 3 tokens


def poor(rounds: int = 54, **changes: Any) -> Finished:
    """60 tokens at 30 ms a round, of which hardly any was drafted well."""
    stats = SpeculationStats(rounds=rounds, emitted=60, tries=(54,), first_hits=6)
    return finished(**{"stats": stats, "total_s": 0.11 + 0.03 * rounds} | changes)


def test_the_usual_is_the_median_of_requests_that_ended_well() -> None:
    odd = finished(queued_s=9.0, reason="abort")
    single = finished(output_tokens=1, stats=SpeculationStats(), queued_s=0.01)
    found = usual([*[ORDINARY] * 3, single, odd, odd, odd, odd, odd])
    assert found == FLEET
    assert (found.queued_s, found.tau) == (0.01, 3.0)
    assert (found.prefill_s, found.round_s) == pytest.approx((0.1, 0.03))
    assert usual([]) == Usual()


@pytest.mark.parametrize(
    ("ended", "sentence"),
    [
        (ORDINARY, "nothing about it was unusual: it is long"),
        (
            finished(queued_s=3.2, first_s=3.3, total_s=3.9),
            "it waited 3.20 s to run first, where 0.01 s is usual",
        ),
        (
            finished(prompt_tokens=12_000, cached_tokens=500, first_s=2.41, total_s=3.01),
            "its prompt took 2.40 s, where 0.10 s is usual: "
            "11500 of 12000 tokens were not in the prefix cache",
        ),
        (
            poor(),
            "only 11% of its drafted tokens were accepted: a round gave 1.1 tokens, where 3.0 are usual",
        ),
        (
            poor(fallback="worker_lost"),
            "it went on without drafts, as its draft worker was lost: "
            "a round gave 1.1 tokens, where 3.0 are usual",
        ),
        (
            poor(fallback="kv"),
            "it went on without drafts, as KV blocks ran out for its drafts: "
            "a round gave 1.1 tokens, where 3.0 are usual",
        ),
        (
            poor(drafter=None, stats=SpeculationStats(rounds=60, emitted=60), total_s=1.91),
            "it decoded without drafts: a round gave 1.0 tokens, where 3.0 are usual",
        ),
        (
            finished(total_s=2.51),
            "a round took 120 ms, where 30 ms is usual: the batch was crowded",
        ),
        (
            finished(total_s=2.51, preemptions=3),
            "a round took 120 ms, where 30 ms is usual: "
            "it gave up its KV blocks 3 times and computed them again",
        ),
    ],
)
def test_the_sentence_names_what_exceeds_the_usual_most(ended: Finished, sentence: str) -> None:
    assert diagnose(ended, FLEET) == sentence


def test_long_rounds_that_went_to_drafting_are_called_so() -> None:
    phases = Phases(steps=10, draft_s=0.8, verify_s=0.15, schedule_s=0.03, commit_s=0.02)
    found = diagnose(finished(total_s=2.51), FLEET, phases)
    assert found == "a round took 120 ms, where 30 ms is usual: drafting was 80% of the steps' time"


def test_the_largest_of_several_reasons_is_told() -> None:
    both = poor(queued_s=0.5, first_s=0.6, total_s=0.6 + 0.03 * 54)
    assert diagnose(both, FLEET).startswith("only 11%")
    later = poor(queued_s=5.0, first_s=5.1, total_s=5.1 + 0.03 * 54)
    assert diagnose(later, FLEET).startswith("it waited 5.00 s")


def test_without_others_to_compare_with_decoding_is_not_blamed() -> None:
    assert diagnose(poor(), Usual()) == "nothing about it was unusual: it is long"
