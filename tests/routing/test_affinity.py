"""The choice of a replica by prefix and load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.routing.affinity import BLOCK, DEPTH, Affinity, chain, choose

IDLE = {0: 0, 1: 0, 2: 0}


def prompt(*parts: int) -> tuple[int, ...]:
    """Each part fills a block."""
    return tuple(part for part in parts for _ in range(BLOCK))


@pytest.mark.parametrize(
    ("known", "load", "replica"),
    [
        ({}, {0: 1, 1: 0, 2: 0}, 1),
        ({2: 1}, IDLE, 2),
        ({1: 1, 2: 3}, IDLE, 2),
        ({1: 3, 2: 3}, {0: 0, 1: 2, 2: 1}, 2),
        ({2: 3}, {0: 0, 1: 0, 2: 4}, 2),
        ({2: 3}, {0: 0, 1: 0, 2: 5}, 0),  # more than twice the least, and 4
        ({2: 3}, {0: 10, 1: 11, 2: 24}, 2),
        ({2: 3}, {0: 10, 1: 11, 2: 25}, 0),
        ({1: 1, 2: 3}, {0: 0, 1: 4, 2: 9}, 1),  # the next best prefix
        ({0: 9}, {1: 3, 2: 2}, 2),  # one that is lost is not in `load`
    ],
)
def test_the_longest_prefix_unless_it_is_too_busy(
    known: dict[int, int], load: dict[int, int], replica: int
) -> None:
    assert choose(known, load) == replica


@given(
    st.dictionaries(st.integers(0, 7), st.integers(1, 32)),
    st.dictionaries(st.integers(0, 7), st.integers(0, 500), min_size=1),
)
def test_no_choice_is_far_busier_than_the_idlest(known: dict[int, int], load: dict[int, int]) -> None:
    assert load[choose(known, load)] <= 2 * min(load.values()) + 4


def test_a_hash_is_that_of_all_before() -> None:
    a, b = chain(prompt(1, 2, 3)), chain(prompt(1, 9, 3))
    assert len(a) == 3
    assert a[0] == b[0]
    assert not {*a[1:]} & {*b[1:]}
    assert chain(prompt(1, 2, 3)[:-1]) == a[:2]
    assert chain((1,) * (BLOCK - 1)) == ()
    assert len(chain(prompt(*range(DEPTH + 5)))) == DEPTH


def test_a_conversation_stays_where_it_began() -> None:
    affinity = Affinity()
    assert affinity.send("t", prompt(1, 2), {0: 5, 1: 0}) == 1
    assert affinity.send("t", prompt(1, 2, 3), {0: 0, 1: 3}) == 1
    assert affinity.send("t", prompt(7), {0: 0, 1: 3}) == 0
    assert affinity.send("t", prompt(1, 2, 3, 4), {0: 0, 1: 3}) == 1
    assert affinity.send("u", prompt(1, 2), {0: 0, 1: 3}) == 0  # another tenant's


def test_a_prefix_that_had_to_spread_is_known_at_both_ends() -> None:
    affinity = Affinity()
    assert affinity.send("t", prompt(1), {0: 0, 1: 1, 2: 1}) == 0
    assert affinity.send("t", prompt(1), {0: 9, 1: 1, 2: 1}) == 1
    assert affinity.send("t", prompt(1), {0: 2, 1: 1, 2: 0}) == 1
    assert affinity.send("t", prompt(1), {0: 1, 1: 2, 2: 0}) == 0


def test_only_an_unbroken_prefix_counts() -> None:
    affinity = Affinity()
    affinity.send("t", prompt(1), {0: 0})
    affinity.send("t", prompt(1, 2), {1: 0})  # 0 has the first block alone
    assert affinity.send("t", prompt(1, 2, 3), {0: 0, 1: 4}) == 1


def test_a_noisy_tenant_does_not_make_others_forget() -> None:
    affinity = Affinity(blocks=8, tenants=2)
    affinity.send("quiet", prompt(1, 2), {1: 0})
    for i in range(100):
        affinity.send("noisy", prompt(1000 + i), {0: 0})
    assert affinity.send("quiet", prompt(1, 2), {0: 0, 1: 4}) == 1
    assert affinity.send("noisy", prompt(1000), {0: 1, 1: 0}) == 1  # forgotten
    assert affinity.send("noisy", prompt(1099), {0: 1, 1: 0}) == 0


def test_a_beginning_outlives_what_follows_it() -> None:
    affinity = Affinity(blocks=3)
    affinity.send("t", prompt(1, 2, 3), {1: 0})
    affinity.send("t", prompt(9), {0: 0})
    assert affinity.send("t", prompt(1, 2), {0: 0, 1: 4}) == 1


def test_the_tenant_that_was_quiet_longest_is_forgotten() -> None:
    affinity = Affinity(tenants=2)
    for tenant in ("a", "b", "a", "c"):
        affinity.send(tenant, prompt(1), {1: 0})
    assert affinity.send("a", prompt(1), {0: 0, 1: 1}) == 1
    assert affinity.send("b", prompt(1), {0: 0, 1: 1}) == 0
