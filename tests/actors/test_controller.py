"""The controller without Ray: killed anywhere it goes on as if nothing had been, and tells nobody early."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.finished import finished
from support.kv import Killed, MemoryKV

from gammaray.actors.desk import GONE_S, Desk, Mandate
from gammaray.actors.front import Front
from gammaray.actors.journal import Journal
from gammaray.actors.reporter import Reporter
from gammaray.config import Config, parse
from gammaray.errors import InvalidRequest, NotFound
from gammaray.routing import audit
from gammaray.routing.bulletin import Known, Origin
from gammaray.routing.health import WEEK_S
from gammaray.routing.learning import LEAST
from gammaray.routing.orders import Order, kill_switch
from gammaray.routing.tenants import change, put, remove
from gammaray.routing.window import CAUSES, COLUMN, WIDTH, Window
from gammaray.types import Finished, KeyCounts, PolicySnapshot, Quality, SpeculationStats, StepReport

NOON = 1_795_780_800.0  # 2026-11-27 12:00 UTC
INTERVAL_S = 5.0


def config(**tenants: Any) -> Config:
    tree = {
        "target": {"model": "tiny"},
        "drafters": {"lookup": {"method": "ngram"}, "other": {"method": "ngram"}},
        "tenants": {"bank": {"drafter": "lookup"}, "shop": {"drafter": "lookup"}} | tenants,
    }
    return parse(tree, "test")


class Case:
    """A desk that may be killed and begins again from what was kept."""

    def __init__(self) -> None:
        self.now, self.kv = NOON, MemoryKV()
        self.numbers = itertools.count(1)
        self.desk = self.start()

    def start(self) -> Desk:
        self.kv = MemoryKV(self.kv.values)
        self.desk = Desk(Mandate(config()), Journal(self.kv), lambda: self.now)
        return self.desk

    def tick(self, *windows: Window) -> None:
        self.now += INTERVAL_S
        self.desk.tell(Origin("r"), windows)
        self.desk.tick()

    def fallen_back(self, tenant: str, share: float = 0.5) -> Window:
        """Of 100 requests so many ended plainly, as too little was accepted."""
        row = np.zeros((1, WIDTH))
        row[0, [COLUMN["planned"], COLUMN["finished"], COLUMN[CAUSES[0]]]] = 100, 100, 100 * share
        return Window("r", next(self.numbers), ((tenant, "default", "lookup"),), row)

    def states(self) -> dict[str, str]:
        return {tenant: self.desk.state(tenant) for tenant in ("bank", "shop")}

    def replayed(self) -> list[audit.Mismatch]:
        return audit.replay(self.desk.records(1000)[::-1])


@pytest.fixture
def case() -> Case:
    return Case()


def policy(desk: Desk) -> PolicySnapshot:
    found = desk.bulletin(Known())
    assert found is not None
    return found.policy


def test_the_tenant_whose_requests_fall_back_is_off_and_no_other(case: Case) -> None:
    case.tick(case.fallen_back("bank"), case.fallen_back("shop", 0.0))
    assert case.states() == {"bank": "off", "shop": "on"}
    assert policy(case.desk).of(("bank", "default", "lookup")).stops
    assert not policy(case.desk).of(("shop", "default", "lookup")).stops
    assert [record["key"] for record in case.desk.records(9)] == [["bank", None, None]]
    assert case.replayed() == []


def pin(desk: Desk) -> object:
    return desk.order(Order("pin_off", "bank"))


def switch(desk: Desk) -> object:
    return desk.order(kill_switch(True))


def add(desk: Desk) -> object:
    return desk.change(lambda roster, now: put(roster, "new", {"drafter": "lookup", "weight": 2.0}))


def tick(desk: Desk) -> object:
    return desk.tick()


def told(desk: Desk) -> tuple[object, ...]:
    """All that others act upon, but for versions."""
    seen = desk.bulletin(Known())
    assert seen is not None and seen.tenants is not None
    rules = seen.policy
    return (rules.speculation, dict(rules.keys), rules.weights, sorted(seen.tenants), seen.used_today)


@pytest.mark.parametrize("what", [pin, switch, add, tick])
def test_a_kill_at_any_moment_leaves_what_was_decided_and_what_was_told_agrees(
    what: Callable[[Desk], object],
) -> None:
    case = Case()
    case.desk.tell(Origin("r"), (window := case.fallen_back("bank"),))
    before, puts = told(case.desk), case.kv.puts
    kept = dict(case.kv.values)
    what(case.desk)
    after, puts = told(case.desk), case.kv.puts - puts
    assert after != before and puts >= 3
    for kill in range(1, puts + 1):
        case.kv = MemoryKV(kept)
        desk = case.start()
        desk.tell(Origin("r"), (window,))
        version = policy(desk).version
        case.kv.kill_after = kill
        with pytest.raises(Killed):
            what(desk)
        assert told(desk) == before, "it told what was not safe"
        again = case.start()
        assert told(again) == (before if kill == 1 else after)
        assert policy(again).version > version
        assert case.replayed() == []


def test_a_restart_changes_no_decision_and_is_newer(case: Case) -> None:
    case.tick(case.fallen_back("bank"))
    pin_shop = case.desk.order(Order("pin_off", "shop", "default"))
    assert len(pin_shop) == 1
    case.desk.change(lambda roster, now: put(roster, "new", {"kv_share": 0.5}))
    before, version = told(case.desk), policy(case.desk).version
    for _ in range(3):
        case.start()
        assert told(case.desk) == before
        assert policy(case.desk).version > version
        version = policy(case.desk).version
    assert case.desk.roster.config.tenants["new"].kv_share == 0.5
    assert len(case.desk.records(9)) == 2


def test_a_tenant_that_was_off_goes_on_waiting_where_it_was(case: Case) -> None:
    case.tick(case.fallen_back("bank"))
    case.start()
    seen = []
    for _ in range(12):
        case.tick()
        seen.append(case.states()["bank"])
    assert seen[0] == "off" and "probe" in seen
    assert case.replayed() == []


def test_a_policy_has_the_weights_of_live_tenants(case: Case) -> None:
    version = policy(case.desk).version
    case.desk.change(lambda roster, now: change(roster, "bank", {"weight": 3.0, "kv_share": 0.25}))
    assert (policy(case.desk).weights, policy(case.desk).kv_shares) == ({"bank": 3.0}, {"bank": 0.25})
    assert policy(case.desk).version > version


def test_a_tenant_that_is_added_again_has_no_prior_of_the_one_before(case: Case) -> None:
    stats = SpeculationStats(rounds=40, emitted=80, tries=(100,), first_hits=90)
    ended = Finished("shop", "default", "lookup", "on", False, "stop", None, 0, 9, 0, 80, stats)
    case.tick(dataclasses.replace(case.fallen_back("shop", 0.0), finished=(ended,) * LEAST))
    key = ("shop", "default", "lookup")
    seen = case.desk.bulletin(Known())
    assert seen is not None and key in seen.priors
    after = case.start().bulletin(Known())
    assert after is not None and key in after.priors  # it outlives the controller
    case.desk.change(lambda roster, now: remove(roster, "shop"))
    case.desk.change(lambda roster, now: put(roster, "shop", {"drafter": "lookup"}))
    again = case.desk.bulletin(Known())
    assert again is not None and key not in again.priors
    assert case.desk.state("shop") == "on"


def test_what_an_operator_may_not_changes_nothing(case: Case) -> None:
    before = policy(case.desk)
    with pytest.raises(NotFound):
        case.desk.order(Order("pin_off", "nobody"))
    with pytest.raises(InvalidRequest):
        case.desk.change(lambda roster, now: put(roster, "new", {"drafter": "nobody"}))
    case.desk.tick()
    assert policy(case.desk) == before


def test_bulletins_say_only_what_is_new(case: Case) -> None:
    first = case.desk.bulletin(Known())
    assert first is not None and first.tenants is not None
    known = Known(first.edition, first.revision)
    assert case.desk.bulletin(known) is None
    case.desk.tick()
    second = case.desk.bulletin(known)
    assert second is not None and second.tenants is None
    case.desk.change(lambda roster, now: remove(roster, "shop"))
    third = case.desk.bulletin(known)
    assert third is not None and third.tenants is not None and "shop" not in third.tenants
    case.start()
    fourth = case.desk.bulletin(Known(third.edition, third.revision))
    assert fourth is not None and fourth.tenants is None


def test_replicas_are_seen_until_they_are_silent(case: Case) -> None:
    def window(source: str, running: int) -> Window:
        return Window(source, 1, (), np.zeros((0, WIDTH)), running=running, kv_total_blocks=9)

    case.desk.tell(Origin("a", "n1", ("GPU-0",)), (window("a", 4),))
    case.now += GONE_S - 1
    case.desk.tell(Origin("b", "n2"), (window("b", 2),))
    case.desk.tick()
    bulletin = case.desk.bulletin(Known())
    assert bulletin is not None and bulletin.concurrency == 3
    seen = case.desk.overview(9)["replicas"]
    assert [(one["source"], one["node"], one["gpus"], one["running"]) for one in seen] == [
        ("a", "n1", ["GPU-0"], 4),
        ("b", "n2", [], 2),
    ]
    case.now += 2
    assert [one["source"] for one in case.desk.overview(9)["replicas"]] == ["b"]


def test_the_overview_tells_versions_and_what_audits_found(case: Case) -> None:
    texts = [
        finished(
            tenant="bank", quality=Quality(100, kl, 8.0), stats=SpeculationStats(tries=(10,), first_hits=n)
        )
        for kl, n in ((0.01, 8), (0.03, 2))
    ]
    case.tick(
        dataclasses.replace(case.fallen_back("bank", 0.0), finished=tuple(texts)),
        case.fallen_back("shop", 0.0),
    )
    seen = {one["tenant"]: one for one in case.desk.overview(9)["tenants"]}
    keys = {name: seen[name]["classes"][0]["keys"][0] for name in ("bank", "shop")}
    assert {name: key["version"] for name, key in keys.items()} == {"bank": "1", "shop": "1"}
    assert (keys["bank"]["kl"], keys["bank"]["perplexity"]) == (pytest.approx(0.02), pytest.approx(8.0))
    assert seen["bank"]["quality"] == {"kl": pytest.approx(-1.0), "perplexity": None}
    assert (keys["shop"]["kl"], keys["shop"]["perplexity"]) == (None, None)
    assert seen["shop"]["quality"] == {"kl": None, "perplexity": None}


def test_a_rotation_that_ray_asks_again_is_answered_as_before(case: Case) -> None:
    first = Front(case.desk).rotate("bank", "a" * 64, None, 60.0)
    case.start()
    second = Front(case.desk).rotate("bank", "a" * 64, None, 60.0)
    assert (first["name"], first["revision"]) == (second["name"], second["revision"])
    assert Front(case.desk).remove("bank")["removed"]
    case.start()
    assert Front(case.desk).remove("bank")["removed"]


EVENTS = st.lists(
    st.one_of(
        st.just("emit"),
        st.just("round"),
        st.just("tick"),
        st.just("fall"),
        st.just("pin"),
        st.just("unpin"),
        st.integers(1, 8),
    ),
    max_size=30,
)


@given(EVENTS)
def test_kills_lose_no_token_no_decision_and_no_order(events: list[str | int]) -> None:
    """An integer kills the controller at that put from then on; the next round finds another one."""
    case, emitted, versions = Case(), 0, [0]
    pinned = False

    def restart() -> None:
        case.start()
        versions.append(policy(case.desk).version)
        assert versions[-1] > versions[-2]

    class Line:
        def tell(self, *arguments: Any) -> Any:
            return case.desk.tell(*arguments)

    reporter = Reporter(Origin("r"), Line(), lambda applied: None, tuple, INTERVAL_S)

    def step() -> None:
        nonlocal emitted, pinned
        if event == "emit":
            stats = SpeculationStats(rounds=1, emitted=1)
            counts = (KeyCounts("bank", "default", "lookup", 1, stats),)
            reporter.add(StepReport(0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, counts))
            emitted += 1
        elif event == "round":
            reporter.round(case.now)
        elif event == "tick":
            case.desk.tick()
        elif event == "fall":
            case.tick(case.fallen_back("shop"))
        elif event in ("pin", "unpin"):
            case.desk.order(Order("pin_off" if event == "pin" else "unpin", "bank"))
            pinned = event == "pin"

    for event in events:
        case.now += 1.0
        if isinstance(event, int):
            case.kv.kill_after = event
            continue
        try:
            step()
        except Killed:
            restart()
            if event in ("pin", "unpin"):  # the operator has no answer, so either may be
                pinned = case.states()["bank"] == "pinned_off"
        versions.append(policy(case.desk).version)
        assert versions[-1] >= versions[-2]
        assert (case.states()["bank"] == "pinned_off") == pinned
    case.kv.kill_after = None
    with suppress(Killed):
        case.desk.tick()
    restart()
    assert (case.states()["bank"] == "pinned_off") == pinned
    assert case.replayed() == []


def test_the_weekly_health_job_alarms_and_remembers_the_week_before_over_a_kill() -> None:
    case = Case()

    def week(alpha: float) -> list[dict[str, str]]:
        for _ in range(2):
            stats = SpeculationStats(rounds=50, emitted=90, tries=(100,), first_hits=round(100 * alpha))
            ended = tuple(finished(tenant="bank", stats=stats) for _ in range(150))
            number = next(case.numbers)
            case.tick(Window("r", number, (), np.zeros((0, WIDTH)), finished=ended))
        case.now += WEEK_S
        case.tick()
        alarms: list[dict[str, str]] = case.desk.overview(10)["alarms"]
        return alarms

    assert week(0.6) == []
    case.start()
    assert week(0.55) == []  # within 15 %
    case.start()
    (alarm,) = week(0.45)
    assert alarm["key"] == "bank/default/lookup" and "P50 fell from 0.55 to 0.45" in alarm["text"]
    case.start()
    assert case.desk.overview(10)["alarms"] == [alarm]
    assert week(0.45) == []


def test_a_count_that_is_no_number_spoils_nothing() -> None:
    case = Case()
    broken = case.fallen_back("bank", 0.0)
    broken.counts[0, [COLUMN["rounds"], COLUMN["extra_s"]]] = np.nan, np.inf
    case.tick(broken, case.fallen_back("shop"))
    assert case.desk.tell(Origin("r"), ()).kept == 2
    assert case.states() == {"bank": "on", "shop": "off"}
