"""What tenants used by day: whatever order windows come in, and however often."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.routing.ledger import KEPT_DAYS, NONE, Ledger, Usage, day_of, end_of
from gammaray.routing.window import COLUMN, WIDTH, Window
from gammaray.types import WARMUP_CLASS, Key

NOON = 1_795_780_800.0  # 2026-11-27 12:00 UTC
DAY_S = 86_400.0


def window(source: str, number: int, used: dict[Key, tuple[int, int, int]]) -> Window:
    """`used`: sequences, tokens of prompts and tokens of outputs, by key."""
    counts = np.zeros((len(used), WIDTH))
    for row, values in zip(counts, used.values(), strict=True):
        row[[COLUMN["finished"], COLUMN["prompt_tokens"], COLUMN["output_tokens"]]] = values
        row[COLUMN["rounds"]] = 99
    return Window(source, number, tuple(used), counts)


def test_a_day_adds_up_over_classes_drafters_and_replicas() -> None:
    ledger = Ledger()
    assert ledger.fold(
        window("a", 1, {("bank", "long", "x"): (1, 10, 5), ("bank", "default", None): (2, 3, 4)}), NOON
    )
    assert ledger.fold(
        window("b", 1, {("bank", "long", "x"): (1, 1, 1), ("shop", "long", "x"): (1, 7, 2)}), NOON
    )
    assert ledger.day("2026-11-27") == {"bank": Usage(4, 14, 10), "shop": Usage(1, 7, 2)}
    assert ledger.day("2026-11-27")["bank"].tokens == 24
    assert ledger.day("2026-11-28") == {}


def test_synthetic_traffic_is_nobody_s() -> None:
    ledger = Ledger()
    ledger.fold(window("a", 1, {("bank", WARMUP_CLASS, "x"): (5, 50, 50)}), NOON)
    assert ledger.day(day_of(NOON)) == {}


def test_a_key_that_only_decoded_is_not_in_the_books() -> None:
    ledger = Ledger()
    ledger.fold(window("a", 1, {("bank", "default", "x"): (0, 0, 0)}), NOON)
    assert ledger.day(day_of(NOON)) == {}


def test_a_day_begins_at_midnight_in_utc() -> None:
    ledger, used = Ledger(), {("bank", "default", None): (1, 1, 0)}
    midnight = end_of(day_of(NOON))
    assert midnight == NOON + DAY_S / 2
    ledger.fold(window("a", 1, used), midnight - 0.001)
    ledger.fold(window("a", 2, used), midnight)
    assert [ledger.day(name)["bank"].tokens for name in ("2026-11-27", "2026-11-28")] == [1, 1]


def test_days_are_kept_for_two_months() -> None:
    ledger, used = Ledger(), {("bank", "default", None): (1, 1, 0)}
    ledger.fold(window("a", 1, used), NOON)
    assert ledger.dirty() == {day_of(NOON)}
    ledger.forget(NOON + KEPT_DAYS * DAY_S)
    assert (ledger.names, ledger.dirty()) == ((day_of(NOON),), set())
    ledger.forget(NOON + (KEPT_DAYS + 1) * DAY_S)
    assert (ledger.names, ledger.dirty()) == ((), {day_of(NOON)})


def test_replicas_that_are_gone_are_forgotten_but_those_of_yesterday_are_not() -> None:
    ledger = Ledger()
    ledger.fold(window("gone", 9, {}), NOON - 2 * DAY_S)
    ledger.fold(window("quiet", 9, {}), NOON - DAY_S)
    ledger.fold(window("a", 1, {}), NOON)
    assert set(ledger.marks.last) == {"quiet", "a"}
    assert not ledger.fold(window("quiet", 9, {}), NOON)


@pytest.mark.parametrize("life", [1, 2])
def test_a_ledger_that_begins_again_goes_on(life: int) -> None:
    ledger, used = Ledger(), {("bank", "default", None): (1, 2, 3)}
    ledger.fold(window("a", 1, used), NOON)
    for _ in range(life):
        ledger = Ledger({name: ledger.day(name) for name in ledger.names}, ledger.marks)
    assert not ledger.fold(window("a", 1, used), NOON)
    assert ledger.fold(window("a", 2, used), NOON)
    assert ledger.day(day_of(NOON)) == {"bank": Usage(2, 4, 6)}


SENT = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["bank", "shop"]), st.integers(0, 50)))


@given(SENT, st.data())
def test_every_window_counts_once_whatever_is_sent_again(
    sent: list[tuple[str, str, int]], data: st.DataObject
) -> None:
    """A replica sends in order, and again from any window that it takes for lost."""
    numbers: Counter[str] = Counter()
    ledger, whole = Ledger(), Counter[str]()
    told: dict[str, list[Window]] = {source: [] for source in "abc"}
    for source, tenant, tokens in sent:
        numbers[source] += 1
        told[source].append(window(source, numbers[source], {(tenant, "default", None): (1, tokens, 0)}))
        whole[tenant] += tokens
        again = data.draw(st.integers(0, len(told[source]) - 1))
        for one in told[source][again:]:
            ledger.fold(one, NOON)
    day = ledger.day(day_of(NOON))
    assert {tenant: day.get(tenant, NONE).tokens for tenant in ("bank", "shop")} == {
        "bank": whole["bank"],
        "shop": whole["shop"],
    }
