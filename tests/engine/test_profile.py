"""What a step costs, as measured at start-up."""

from __future__ import annotations

import pytest

from gammaray.engine.profile import StepProfile, measure
from gammaray.engine.sim import Language, SimClock, SimDevice, StepCost

COST = StepCost(((1, 0.01), (4, 0.01), (64, 0.05)))


def device(clock: SimClock, cost: StepCost = COST, blocks: int = 16) -> SimDevice:
    return SimDevice(Language(16), clock, cost, num_blocks=blocks, block_size=4)


def test_the_profile_of_a_simulated_device_is_its_cost_table() -> None:
    clock = SimClock()
    found = measure(device(clock), 40, clock)
    assert [tokens for tokens, _ in found.points] == [1, 2, 4, 8, 16, 32, 40]
    for tokens, seconds in found.points:
        assert seconds == pytest.approx(COST.seconds(tokens))


def test_it_feeds_no_more_than_the_pool_holds() -> None:
    clock = SimClock()
    assert measure(device(clock, blocks=3), 256, clock).points[-1][0] == 9


def test_a_larger_batch_that_was_faster_shows_that_the_smaller_was_disturbed() -> None:
    """SPS(B) is made non-increasing (math.md section 3)."""
    clock = SimClock()
    disturbed = iter([0.0, *[0.5, 0.2, 0.3] * 3])

    class Jitter:
        num_blocks, block_size, vocab_size = 16, 4, 16

        def forward(self, rows):  # type: ignore[no-untyped-def]
            clock.advance(next(disturbed))

    assert [s for _, s in measure(Jitter(), 4, clock).points] == pytest.approx([0.2, 0.2, 0.3])


def test_the_fastest_pass_counts_and_a_disturbance_does_not_hit_all_of_a_size() -> None:
    clock = SimClock()
    taken = iter([9.0, 0.3, 0.5, 0.2, 0.4, 0.7, 0.8])

    class Disturbed:
        num_blocks, block_size, vocab_size = 16, 4, 16

        def forward(self, rows):  # type: ignore[no-untyped-def]
            clock.advance(next(taken))

    assert [s for _, s in measure(Disturbed(), 2, clock).points] == pytest.approx([0.2, 0.4])


def test_beyond_the_table_every_token_costs_as_in_its_last_row() -> None:
    profile = StepProfile(((1, 0.01), (100, 0.1)))
    assert profile.seconds(300) == pytest.approx(0.3)
    assert profile.sps(100) == pytest.approx(10)
