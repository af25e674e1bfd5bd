"""When a worker drafts ahead. Whole runs in simulated time: test_link.py."""

from __future__ import annotations

from gammaray.actors.link.rhythm import RETRY, Rhythm


def a_round(rhythm: Rhythm, now: float, gap: float, cost: float) -> bool:
    """One answer, at most one pass of this cost, the next question after `gap`. Was there a pass?"""
    rhythm.answered(now)
    allowed = {rhythm.allows(now) for _ in range(3)}  # as often as anybody likes to ask
    assert len(allowed) == 1
    if allowed == {True}:
        rhythm.passed(now, now + cost)
    rhythm.asked(now + gap)
    return allowed == {True}


def test_a_pass_that_did_not_fit_is_tried_again_and_ever_more_rarely() -> None:
    rhythm = Rhythm()
    rounds = [a_round(rhythm, i * 0.010, gap=0.010, cost=0.050) for i in range(8 * RETRY)]
    tried = [i for i, there in enumerate(rounds) if there]
    assert tried == [0, RETRY + 1, 3 * RETRY + 2, 7 * RETRY + 3]


def test_a_pass_that_fits_again_is_made_in_every_round() -> None:
    rhythm = Rhythm()
    costs = [0.050, 0.050, *[0.001] * (4 * RETRY)]
    rounds = [a_round(rhythm, i * 0.010, 0.010, cost) for i, cost in enumerate(costs)]
    assert all(rounds[RETRY + 3 :])
    assert not all(rounds)
