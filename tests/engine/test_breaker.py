"""What one request may draft, by how its own last rounds went."""

from __future__ import annotations

import pytest

from gammaray.engine.breaker import ROUNDS, Breaker, Trial

GAIN = {"base_s": 1.0, "extra_s": 0.05}  # a draft costs 5 % of a step
LOSS = {"base_s": 1.0, "extra_s": 0.5}


def after(rounds: int, accepted: int, of: int = 10, **cost: float) -> Breaker:
    """Rounds that tested one level; `accepted` of every `of` took the first child."""
    breaker = Breaker()
    for number in range(rounds):
        took = number % of < accepted
        breaker.add(Trial(1, int(took), 1 + took, **(cost or GAIN)))
    return breaker


@pytest.mark.parametrize(
    ("accepted", "of", "depth"),
    [(16, 16, 8), (10, 16, 8), (9, 16, 4), (5, 16, 4), (4, 16, 2), (0, 16, 2)],
)
def test_depth_follows_the_last_16_rounds(accepted: int, of: int, depth: int) -> None:
    """0.6 and 0.3 lie between 9/16 and 10/16, and between 4/16 and 5/16."""
    assert after(ROUNDS, accepted, of).limit(8, hot=False) == depth


def test_nothing_is_known_before_16_rounds_and_what_is_older_is_forgotten() -> None:
    early = after(ROUNDS - 1, 0)
    assert (early.alpha, early.limit(8, False)) == (None, 8)
    for _ in range(ROUNDS):
        early.add(Trial(1, 1, 2, **GAIN))
    assert early.limit(8, False) == 8


def test_a_small_allowance_is_never_raised() -> None:
    assert after(ROUNDS, 0).limit(1, False) == 1
    assert after(ROUNDS, 8).limit(3, False) == 3


@pytest.mark.parametrize(
    ("rounds", "accepted", "cost", "is_open"),
    [
        (16, 4, LOSS, True),  # tau 1.25 in 1.5 of the time
        (15, 0, LOSS, False),
        (16, 5, LOSS, False),  # alpha is not below 0.3
        (16, 4, GAIN, False),  # it still pays
        (16, 0, {"base_s": 0.0, "extra_s": 0.0}, False),  # without a profile nobody knows
    ],
)
def test_it_opens_for_good_where_little_is_accepted_and_it_costs(
    rounds: int, accepted: int, cost: dict[str, float], is_open: bool
) -> None:
    breaker = after(rounds, accepted, 16, **cost)
    assert breaker.open is is_open
    for _ in range(is_open * ROUNDS):
        breaker.add(Trial(1, 1, 2, **GAIN))
    assert breaker.open is is_open


def test_hot_requests_begin_with_one_level_until_32_tokens_were_tested() -> None:
    breaker = Breaker()
    assert breaker.limit(8, hot=False) == 8
    for _ in range(31):
        breaker.add(Trial(1, 1, 2, **GAIN))
    assert breaker.limit(8, hot=True) == 1
    breaker.add(Trial(1, 1, 2, **GAIN))
    assert breaker.limit(8, hot=True) == 8
