"""What a key may do when its tenant, its class and itself are in different states."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from gammaray.routing.policy import effective
from gammaray.routing.states import Unit
from gammaray.types import FREE, KeyPolicy

ON = Unit()
PROBE, RAMP = Unit("probe", share=0.02), Unit("ramp", share=0.1)
OFF, PINNED = Unit("off", until=9.0, epoch=1), Unit("pinned_off", epoch=2)


def under(tenant: Unit, request_class: Unit, key: Unit, down: bool = False) -> KeyPolicy:
    return effective(tenant, request_class, key, down, FREE.width)


@pytest.mark.parametrize("units", list(permutations((OFF, PINNED, PROBE))))
def test_the_worst_level_holds_and_every_stop_counts(units: tuple[Unit, Unit, Unit]) -> None:
    found = under(*units)
    assert (found.state, found.epoch, found.share) == ("pinned_off", 3, 0.02)


@pytest.mark.parametrize("at", range(3))
def test_each_stop_of_any_level_begins_an_epoch(at: int) -> None:
    """A request that was planned between two stops is behind the second one, whoever it was that stopped."""
    units = [Unit(epoch=3), Unit(epoch=1), Unit(epoch=0)]
    before = under(*units)
    units[at] = replace(units[at], state="off", epoch=units[at].epoch + 1)
    assert under(*units).epoch == before.epoch + 1


@pytest.mark.parametrize("other", [ON, RAMP, Unit("shadow", share=0.05), Unit("contract", gamma=3, width=1)])
def test_below_a_probe_everything_drafts_chains_of_two(other: Unit) -> None:
    for units in permutations((PROBE, ON)):
        found = under(*units, key=other)
        assert (found.gamma, found.width, found.share) == (2, 1, 0.02)
    assert under(ON, ON, replace(PROBE, gamma=1)).gamma == 1


def test_shares_are_not_shares_of_shares() -> None:
    """Whoever is in a share is in every larger one, so the smallest is what is left."""
    assert under(RAMP, RAMP, Unit("ramp", share=0.5)).share == 0.1


def test_a_lost_pool_is_off_without_an_epoch_and_no_less_than_off() -> None:
    assert under(ON, ON, ON, down=True) == KeyPolicy("off")
    assert under(PINNED, ON, ON, down=True).state == "pinned_off"
    assert under(ON, ON, Unit("emergency", epoch=1), down=True).state == "off"
