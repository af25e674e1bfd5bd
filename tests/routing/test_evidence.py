"""Windows that grow and are cleared, against the plainest way to count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.windows import Traffic, row

from gammaray.routing import facts
from gammaray.routing.evidence import EXCUSED, LOST, PLANNED, TESTED, Evidence, sums
from gammaray.routing.window import WIDTH, Counts

NOBODY = np.zeros(0, np.intp)
ONE = np.zeros(1, np.intp)


def counting(**columns: float) -> Counts:
    """[1, WIDTH]"""
    counts = np.zeros((1, WIDTH))
    for name, value in columns.items():
        counts[0, {"tested": TESTED, "planned": PLANNED, "lost": LOST}[name]] = value
    return counts


def evidence(*ticks: float, interval_s: float = 5.0) -> Evidence:
    """Of one key with so many tested tokens in each tick."""
    found = Evidence(interval_s)
    found.reserve(1)
    for tested in ticks:
        found.add(ONE, counting(tested=tested))
        found.close(NOBODY)
    return found


def span(found: Evidence, name: str = "tested", least: int = 200) -> int:
    return int(found.span(ONE, ONE, 1, name, least)[0])


@pytest.mark.parametrize(
    ("ticks", "expected"),
    [
        ((200,), 1),
        ((199,), 0),
        ((199, 1), 2),
        ((500, 200), 1),
        ((500, 199), 2),
        ((200, *[0] * 10, 1), 12),
        ((200, *[0] * 11, 1), 0),  # longer ago than a minute
        ((500, 0), 0),  # nothing new
        ((), 0),
    ],
)
def test_a_window_grows_until_it_holds_enough(ticks: tuple[float, ...], expected: int) -> None:
    assert span(evidence(*ticks)) == expected


@pytest.mark.parametrize(("interval_s", "depth"), [(5.0, 12), (0.5, 12), (20.0, 3), (60.0, 1)])
def test_no_window_is_longer_than_a_minute(interval_s: float, depth: int) -> None:
    assert evidence(interval_s=interval_s).depth == depth


def test_clearing_begins_anew() -> None:
    found = evidence(500, 500)
    found.clear(ONE)
    assert span(found) == 0
    found.add(ONE, counting(tested=150))
    found.close(NOBODY)
    assert span(found) == 0
    found.add(ONE, counting(tested=60))
    found.close(NOBODY)
    assert span(found) == 2
    assert found.since(ONE, 2)[0, TESTED] == found.total(ONE)[0, TESTED] == 210
    assert found.recent(ONE)[0, TESTED] == 1210


def test_clearing_within_a_tick_leaves_out_what_came_before() -> None:
    found = evidence(500)
    found.add(ONE, counting(tested=300))
    found.clear(ONE)
    assert found.total(ONE)[0, TESTED] == 0
    found.add(ONE, counting(tested=70))
    found.close(NOBODY)
    assert found.since(ONE, 1)[0, TESTED] == found.total(ONE)[0, TESTED] == 70


def test_a_lost_worker_is_excused() -> None:
    """In the tick of the incident alone, and out of numerator and denominator."""
    found = evidence()
    for excused in (ONE, NOBODY):
        found.add(ONE, counting(planned=30, lost=10))
        found.close(excused)
    counts = found.total(ONE)[0]
    assert (counts[PLANNED], counts[LOST], counts[EXCUSED]) == (50, 10, 10)


def test_a_row_is_used_again_without_its_past() -> None:
    found = evidence(500, 500)
    found.forget(0)
    assert not found.recent(ONE).any()
    assert not found.total(ONE).any()
    found.add(ONE, counting(tested=200))
    assert found.close(NOBODY).tolist() == [0]
    assert found.since(ONE, 12)[0, TESTED] == 200


def test_only_touched_rows_are_told() -> None:
    found = Evidence(5.0)
    found.reserve(4)
    found.add(np.array([1, 3]), np.repeat(counting(tested=1), 2, axis=0))
    assert found.close(NOBODY).tolist() == [1, 3]
    assert found.close(NOBODY).tolist() == []


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 300), min_size=3, max_size=3), st.integers(0, 3)), max_size=30)
)
def test_like_a_list_of_ticks(story: list[tuple[list[int], int]]) -> None:
    """Three keys; after some ticks one of them is cleared (3: none). The first two are one group."""
    found, kept = Evidence(5.0), [[], [], []]  # type: tuple[Evidence, list[list[int]]]
    found.reserve(3)
    rows, group = np.arange(3), np.array([0, 0, 1])
    for counts, cleared in story:
        for key, tested in enumerate(counts):
            found.add(np.array([key]), counting(tested=tested))
            kept[key].append(tested)
        found.close(NOBODY)
        ticks = [2, 12, 5]
        assert found.since(rows, np.array(ticks))[:, TESTED].tolist() == [
            sum(own[-n:]) for own, n in zip(kept, ticks, strict=True)
        ]
        assert found.total(rows)[:, TESTED].tolist() == [sum(own) for own in kept]
        expected = [_plain_span([kept[0], kept[1]]), _plain_span([kept[2]])]
        assert found.span(rows, group, 2, "tested", 200).tolist() == expected
        if cleared < 3:
            found.clear(np.array([cleared]))
            kept[cleared].clear()


def _plain_span(group: list[list[int]]) -> int:
    if not sum(own[-1] for own in group if own):
        return 0
    return next((n for n in range(1, 13) if sum(sum(own[-n:]) for own in group) >= 200), 0)


def test_sums_by_group() -> None:
    counts = np.arange(12.0).reshape(4, 3)
    assert sums(counts, np.array([1, 0, 1, 1]), 3).tolist() == [[3, 4, 5], [15, 18, 21], [0, 0, 0]]
    assert sums(counts, np.arange(4), 4) is counts


def test_numbers_of_units() -> None:
    """Two keys of one class: rates over both, from as many ticks as these need; nan where that is too few."""
    found = Evidence(5.0)
    found.reserve(3)
    rows, unit = np.arange(3), np.array([4, 4, 1])
    found.add(
        rows, np.array([row(Traffic(rounds=n, alpha=0.5, planned=12, fallbacks=3)) for n in (60, 90, 20)])
    )
    found.close(NOBODY)
    columns = facts.unknown(5)
    facts.rates(columns, found, rows, unit)
    facts.fallbacks(columns.fr, found, rows, unit)
    assert columns.alpha[4] == pytest.approx(0.5)
    assert columns.s[4] == pytest.approx(1.9375 / 1.2)
    assert columns.s_low[4] < columns.s[4] < columns.s_high[4]
    assert columns.fr[4] == pytest.approx(0.25)
    assert np.isnan(columns.alpha[[0, 1, 2, 3]]).all()
    assert np.isnan(columns.fr[[0, 1, 2, 3]]).all()


@pytest.mark.parametrize(("alpha", "best"), [(0.5, 3), (0.6, 4), (0.7, 6)])
def test_the_best_depth(alpha: float, best: int) -> None:
    """As in the table of math.md section 2; nearly as good is good enough to stay shallower."""
    found = Evidence(5.0)
    found.reserve(1)
    found.add(ONE, row(Traffic(rounds=20_000, alpha=alpha, gamma=8))[None])
    found.close(NOBODY)
    columns = facts.unknown(1)
    facts.depths(columns, found, ONE, np.array([8]), np.array([8]))
    assert columns.best[0] == best
    facts.depths(columns, found, ONE, np.array([best - 1]), np.array([8]))
    assert columns.best[0] in (best - 1, best)


@pytest.mark.parametrize(("planned", "rate"), [(20, 0.05), (19, np.nan)])
def test_what_a_probe_saw(planned: int, rate: float) -> None:
    """A fallback rate needs its 20 requests here too."""
    found = evidence(400)
    found.clear(ONE)
    found.add(ONE, row(Traffic(rounds=900, alpha=0.8, gamma=2, planned=planned, fallbacks=1))[None])
    found.close(NOBODY)
    columns = facts.unknown(1)
    facts.probes(columns, found, ONE, ONE, np.array([4]))
    assert columns.tested[0] == pytest.approx(900 * 1.8)
    assert 2.0 < columns.probe_low[0] < 2.8  # S(4) is 2.8
    assert columns.probe_fr[0] == pytest.approx(rate, nan_ok=True)
