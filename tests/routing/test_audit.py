"""Records of decisions decide the same again; what somebody changed in them is found."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from support.windows import Traffic, window

from gammaray.config import Tenant
from gammaray.errors import InvalidRequest
from gammaray.routing.audit import Decision, decision, read, record, replay
from gammaray.routing.control import Control
from gammaray.routing.orders import Order, kill_switch
from gammaray.routing.states import Facts, Unit, to_json, unit_from

KEY = ("bank", "default", "a")
Json = dict[str, Any]


@pytest.fixture(scope="module")
def decisions() -> list[Decision]:
    """A class falls, is probed, fails and is probed again; the operator is there too."""
    tenant = Tenant.model_validate({"drafter": "a", "speculation": {"gamma": 8, "tree_width": 2}})
    control, found = Control({"bank": tenant}, {"a": "ngram"}), list[Decision]()
    for tick in range(1, 80):
        control.fold(window(tick, {KEY: Traffic(9000, 0.5 if tick < 9 else 0.1, gamma=8)}))
        found += control.tick(5.0 * tick)
    found += control.act(kill_switch(True), 400.0)
    found += control.act(Order("pin_off", "bank", reason="a customer asked"), 401.0)
    return found


@pytest.fixture
def log(decisions: list[Decision]) -> list[Json]:
    """As it is read from a file."""
    return list(read([json.dumps(record(one), allow_nan=False) + "\n" for one in decisions]))


def test_a_log_decides_the_same_again(decisions: list[Decision], log: list[Json]) -> None:
    assert len(log) > 10
    assert {one["level"] for one in log} == {"global", "tenant", "class", "key"}
    assert replay(log) == []
    assert [record(decision(one)) for one in log] == log == [record(one) for one in decisions]


def change(path: str, value: object) -> Callable[[Json], None]:
    def make(tree: Json) -> None:
        *above, last = path.split(".")
        for name in above:
            tree = tree[name]
        assert tree.get(last) != value
        tree[last] = value

    return make


@pytest.mark.parametrize("tamper", [
    change("new.state", "on"), change("new.until", 1e9), change("new.delay_s", 5.0), change("new.epoch", 9),
    change("numbers.alpha", 0.11), change("numbers.alpha", 0.9), change("limits.name", "bank/other"),
    change("rule", "slow"), change("reason", "it looked bad"), change("time", 1.0),
    change("old.state", "off"),
])  # fmt: skip
def test_a_tampered_record_is_found(log: list[Json], tamper: Callable[[Json], None]) -> None:
    at = next(i for i, one in enumerate(log) if one["rule"] == "low_acceptance")
    changed = copy.deepcopy(log)
    tamper(changed[at])
    assert at in [one.index for one in replay(changed)]


def test_a_missing_record_is_found(log: list[Json]) -> None:
    at = next(i for i, one in enumerate(log) if one["new"]["state"] == "probe")
    found = replay(log[:at] + log[at + 1 :])
    assert found[0].why == "it began in probe, but the record before left the unit in off"


def test_a_line_that_a_crash_cut_off_is_left_out(log: list[Json]) -> None:
    lines = [json.dumps(one) for one in log]
    assert list(read([*lines[:3], lines[3][:40]])) == log[:3]
    with pytest.raises(InvalidRequest, match="line 2 of the audit log"):
        list(read([lines[0], lines[1][:40], lines[2]]))


@pytest.mark.parametrize("broken", [
    {}, [], "x", {"key": ["bank"]}, {"old": {"mood": 1}}, {"limits": {"level": "moon"}}, {"old": None},
])  # fmt: skip
def test_what_is_no_record(log: list[Json], broken: Any) -> None:
    tree = {**log[0], **broken} if isinstance(broken, dict) and broken else broken
    with pytest.raises(InvalidRequest, match="no record of a decision"):
        replay([tree])


@pytest.mark.parametrize("line", ["5", "[]", "null", '"x"', "NaN"])
def test_a_line_that_is_no_object(line: str) -> None:
    with pytest.raises(InvalidRequest, match="line 1 of the audit log is no record"):
        list(read([line]))


@pytest.mark.parametrize(("part", "name", "value"), [
    ("numbers", "alpha", "x"), ("numbers", "alpha", [1]), ("numbers", "action", "dance"),
    ("old", "delay_s", "on"), ("old", "low", "nan"),
])  # fmt: skip
def test_values_that_nothing_can_be_decided_with(log: list[Json], part: str, name: str, value: Any) -> None:
    changed = [copy.deepcopy(one) for one in log if one["rule"] == "low_acceptance"][:1]
    changed[0][part][name] = value
    with pytest.raises(InvalidRequest, match="no decision can be made from this record"):
        replay(changed)


def test_numbers_tell_what_is_missing(log: list[Json]) -> None:
    """Also a record whose unit has no other one, and the order of two units' records."""
    numbered = [{"number": 7 + i, **one} for i, one in enumerate(log)]
    assert replay(numbered) == replay(numbered[3:]) == []
    assert [one.index for one in replay(numbered[:-2] + numbered[-1:])] == [len(numbered) - 2]
    swapped = [*numbered[:-2], numbered[-1], numbered[-2]]
    assert [one.why for one in replay(swapped)] == [
        f"it is number {7 + len(log) - 1 - i}, but the record before is number {before}"
        for i, before in ((0, 7 + len(log) - 3), (1, 7 + len(log) - 1))
    ]


def test_what_is_unknown_is_left_out() -> None:
    assert to_json(Facts(alpha=math.nan, s=1.5)) == {"s": 1.5}
    unit = Unit("ramp", widths=((2, 1.5, 7.0),), incidents=(1.0, 2.0))
    assert unit_from(json.loads(json.dumps(to_json(unit)))) == unit
