"""The control loop over traffic that heeds its policy."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.windows import Traffic, window

from gammaray.config import Tenant
from gammaray.errors import InvalidRequest, NotFound
from gammaray.routing.audit import Decision, record, replay
from gammaray.routing.control import Control
from gammaray.routing.orders import Order, kill_switch
from gammaray.routing.policy import Publisher
from gammaray.routing.states import STOPPED
from gammaray.types import FREE, DraftLinks, Finished, Key, KeyPolicy, SpeculationStats

METHODS = {"a": "ngram", "b": "ngram", "big": "model"}
BANK, SHOP = ("bank", "default", "a"), ("shop", "default", "a")
BAD = Traffic(alpha=0.12, rounds=400)


def tenant(**fields: Any) -> Tenant:
    return Tenant.model_validate({"drafter": "a", "speculation": {"gamma": 4}, **fields})


@dataclass
class World:
    """Each tick of 5 s, every key has its traffic as far as the policy lets it, the rest is plain."""

    tenants: Mapping[str, Tenant] = field(default_factory=lambda: {"bank": tenant(), "shop": tenant()})
    traffic: dict[Key, Traffic] = field(default_factory=lambda: {BANK: Traffic(), SHOP: Traffic()})
    links: tuple[DraftLinks, ...] = ()
    running: int = 8
    now: float = 1000.0
    number: int = 0
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.control = Control(self.tenants, METHODS, now=self.now)

    def told(self, key: Key, wanted: Traffic) -> dict[Key, Traffic]:
        allowed = self.policy(key)
        if allowed.stops or not self.control.policy.speculation:
            return {(*key[:2], None): Traffic(wanted.rounds, planned=0, gamma=0)}
        share = allowed.share
        told = replace(wanted, rounds=round(wanted.rounds * share), gamma=min(wanted.gamma, allowed.gamma))
        counts = {name: round(getattr(wanted, name) * share) for name in ("planned", "fallbacks", "lost")}
        return {key: replace(told, **counts)}

    def tick(self, ticks: int = 1) -> list[Decision]:
        decided: list[Decision] = []
        for _ in range(ticks):
            told: dict[Key, Traffic] = {}
            for key, wanted in self.traffic.items():
                told |= self.told(key, wanted)
            self.number += 1
            self.control.fold(window(self.number, told, links=self.links, running=self.running))
            self.now += 5.0
            decided += self.control.tick(self.now)
        self.decisions += decided
        return decided

    def act(self, order: Order) -> list[Decision]:
        decided = list(self.control.act(order, self.now))
        self.decisions += decided
        return decided

    def policy(self, key: Key) -> KeyPolicy:
        return self.control.policy.of(key)

    def until(self, key: Key, *states: str, ticks: int = 200) -> int:
        """Ticks until the key comes into one of these."""
        for tick in range(1, ticks + 1):
            self.tick()
            if self.policy(key).state in states:
                return tick
        raise AssertionError(f"{key} is {self.policy(key)}, not {states}")


def rules(decisions: list[Decision]) -> list[tuple[str, str]]:
    return [(one.level, one.rule) for one in decisions]


def test_steady_traffic_changes_nothing() -> None:
    world = World()
    assert world.tick(40) == []
    assert (world.control.policy.keys, world.control.policy.version) == ({}, 0)


def test_a_collapse_turns_one_class_off_within_ten_seconds_and_it_comes_back_step_by_step() -> None:
    world = World()
    world.tick(20)
    world.traffic[BANK] = BAD
    assert rules(world.tick(1)) == [("class", "low_acceptance")]
    assert world.policy(BANK) == KeyPolicy("off", epoch=1)
    assert world.policy(SHOP) == FREE
    world.traffic[BANK] = Traffic(rounds=40_000)
    assert world.until(BANK, "probe") in (6, 7)
    probe = world.policy(BANK)
    assert (probe.gamma, probe.width, probe.share, probe.epoch) == (2, 1, 0.02, 1)
    shares = []
    while world.policy(BANK).state != "on":
        world.tick()
        shares.append(world.policy(BANK).share)
    assert shares == [0.1, 0.1, 0.5, 0.5, 1.0, 1.0, 1.0]
    assert world.policy(SHOP) == FREE


def test_failing_probes_wait_longer_each_time() -> None:
    world = World(traffic={BANK: replace(BAD, rounds=40_000)})
    world.tick(300)
    falls = [one for one in world.decisions if one.new.state == "off"]
    delays = [one.new.delay_s for one in falls]
    assert delays == [30, 60, 120, 240, 480, 960]
    gaps = [later.time - earlier.time for earlier, later in pairwise(falls)]
    assert all(gap >= 0.9 * delay for gap, delay in zip(gaps, delays, strict=False))


def test_a_fallback_rate_of_sixteen_percent_disables_exactly_that_tenant() -> None:
    world = World()
    world.traffic[BANK] = Traffic(planned=100, fallbacks=16)
    assert rules(world.tick()) == [("tenant", "tenant_off")]
    assert world.policy(BANK).state == world.policy(("bank", "warmup", "a")).state == "off"
    assert world.policy(SHOP) == FREE


def test_below_a_tenant_that_is_off_nothing_else_is_decided() -> None:
    world = World()
    world.traffic[BANK] = replace(BAD, planned=100, fallbacks=16)
    assert rules(world.tick()) == [("tenant", "tenant_off")]


def test_a_fallback_rate_of_eleven_percent_is_an_emergency() -> None:
    world = World()
    world.traffic[BANK] = Traffic(planned=100, fallbacks=11)
    assert rules(world.tick()) == [("tenant", "emergency")]
    world.traffic[BANK] = Traffic(rounds=40_000)
    assert world.until(BANK, "probe") == 6
    assert world.until(BANK, "on") == 7


def test_low_acceptance_comes_before_an_emergency() -> None:
    world = World()
    world.traffic[BANK] = replace(BAD, planned=100, fallbacks=12)
    assert rules(world.tick()) == [("class", "low_acceptance")]


def test_few_requests_prove_nothing() -> None:
    world = World()
    world.traffic[BANK] = Traffic(rounds=20, alpha=0.05, planned=1, fallbacks=1)
    assert world.tick(7) == []  # 7 of 20 requests, and 147 of 200 tokens


def test_a_clock_that_is_set_back_blinds_nobody() -> None:
    """What fell before waits no longer, and what goes wrong now is seen."""
    world = World()
    world.traffic[BANK] = BAD
    world.tick()
    world.now -= 86_400.0
    world.traffic[SHOP] = BAD
    assert rules(world.tick()) == [("class", "exit"), ("class", "low_acceptance")]
    assert (world.policy(BANK).state, world.policy(SHOP).state) == ("probe", "off")


def test_a_clock_that_jumps_ahead_ends_what_waits() -> None:
    world = World()
    world.traffic[BANK] = BAD
    world.tick()
    world.now += 86_400.0
    world.tick()
    assert (world.policy(BANK).state, world.policy(SHOP)) == ("probe", FREE)


def test_thin_traffic_comes_back_as_well() -> None:
    """A tenth of it never has 200 tested tokens in a minute; each stage takes its time instead."""
    world = World(traffic={BANK: Traffic(rounds=40, planned=1)})
    world.act(Order("pin_off", "bank"))
    world.act(Order("unpin", "bank"))
    world.until(BANK, "on", ticks=1000)
    ramps = [one for one in world.decisions if one.new.state == "ramp"]
    assert [one.new.share for one in ramps] == [0.1, 0.5, 1.0]
    assert ramps[1].time - ramps[0].time == 600.0
    assert replay([record(one) for one in world.decisions]) == []


def test_thin_traffic_that_does_not_pay_does_not_come_back() -> None:
    world = World(traffic={BANK: Traffic(rounds=40, planned=1)})
    world.act(Order("pin_off", "bank"))
    world.act(Order("unpin", "bank"))
    world.until(BANK, "ramp")
    world.traffic[BANK] = replace(BAD, rounds=40, planned=1)
    world.until(BANK, "off", ticks=1000)
    assert world.decisions[-1].new.reason.startswith("ramp failed: ")


def test_slow_drafts_are_contracted_and_then_off() -> None:
    slow = Traffic(alpha=0.5, cost=0.5, rounds=4000)
    world = World(traffic={BANK: slow})
    assert world.tick(2) == []
    assert rules(world.tick()) == [("key", "contract")]
    assert (world.policy(BANK).state, world.policy(BANK).gamma, world.policy(BANK).width) == (
        "contract",
        1,
        1,
    )
    world.traffic[BANK] = replace(slow, cost=0.6)
    assert world.tick(2) == []
    assert rules(world.tick()) == [("class", "slow")]


def test_contracting_may_help() -> None:
    world = World(traffic={BANK: Traffic(alpha=0.4, cost=0.2, rounds=4000, gamma=8)},
                  tenants={"bank": tenant(speculation={"gamma": 8})})  # fmt: skip
    world.tick(3)
    assert world.policy(BANK).gamma == 1
    assert rules(world.tick(3)) == [("key", "exit")]
    assert (world.policy(BANK).state, world.policy(BANK).gamma) == ("on", 1)


def test_depth_follows_what_is_accepted() -> None:
    world = World(traffic={BANK: Traffic(alpha=0.5, gamma=8, rounds=4000)},
                  tenants={"bank": tenant(speculation={"gamma": 8})})  # fmt: skip
    depths = []
    for _ in range(7):
        world.tick()
        depths.append(world.policy(BANK).gamma)
    assert depths == [7, 6, 5, 4, 3, 3, 3]
    fixed = World(
        traffic=world.traffic, tenants={"bank": tenant(speculation={"gamma": 8, "adaptive": False})}
    )
    assert fixed.tick(7) == []


def test_busy_replicas_draft_narrower_trees() -> None:
    wide = tenant(speculation={"gamma": 4, "tree_width": 8, "adaptive": False})
    world = World(tenants={"bank": wide, "shop": tenant()})
    widths = []
    for running in (8, 32, 33, 64, 300, 8):
        world.running = running
        world.tick()
        widths.append(world.policy(BANK).width)
    assert widths == [8, 8, 7, 4, 1, 8]
    assert world.policy(SHOP) == FREE


def links(workers: int, losses: int) -> tuple[DraftLinks, ...]:
    return (DraftLinks("bank", "a", workers, losses=losses),)


def test_a_lost_single_worker_pool_does_not_turn_its_tenant_off() -> None:
    world = World(links=links(1, 0))
    world.tick(3)
    world.links = links(0, 1)
    world.traffic[BANK] = Traffic(planned=50, lost=50)
    assert world.tick() == []
    assert world.policy(BANK) == KeyPolicy("off")  # at once, but no epoch: requests go on with the worker
    stale = Traffic(rounds=0, planned=30, lost=30)  # requests that began before go on ending plainly
    for _ in range(5):
        world.number += 1
        world.control.fold(window(world.number, {BANK: stale}, links=world.links))
        world.now += 5.0
        assert world.control.tick(world.now) == ()
    found = world.tick()
    assert rules(found) == [("key", "availability")]
    assert found[0].new.epoch == 1
    world.traffic[BANK] = Traffic(rounds=40_000)
    world.links = links(1, 1)
    assert world.until(BANK, "probe") == 1
    assert world.until(BANK, "on") == 7
    assert not [one for one in world.decisions if one.level == "tenant"]


def test_a_worker_that_is_back_soon_costs_no_state() -> None:
    world = World(links=links(1, 0))
    world.tick()
    world.links = links(0, 1)
    world.tick(3)
    world.links = links(1, 1)
    assert world.tick() == []
    assert world.policy(BANK) == FREE


def test_three_lost_workers_in_five_minutes() -> None:
    world = World(
        links=links(4, 7), number=9
    )  # what a replica lost before this controller heard of it is old
    world.tick(2)
    for losses in (8, 9):
        world.links = links(4, losses)
        assert world.tick(3) == []
    world.links = links(4, 10)
    assert rules(world.tick()) == [("key", "availability")]


def test_a_loss_that_two_replicas_see_is_one() -> None:
    """At the same tick or at the next one."""
    world = World()
    story = [(1, 0, 0), (2, 1, 1), (3, 2, 1), (4, 2, 2)]  # tick, losses seen by one and by the other
    for number, one, other in story:
        for source, losses in (("r1", one), ("r2", other)):
            world.control.fold(window(number, {BANK: Traffic()}, source, links(3, losses)))
        world.now += 5.0
        assert world.control.tick(world.now) == ()
    (key,) = world.control.memory()["bank"].keys
    assert len(key[2].incidents) == 2


def test_a_lost_worker_counts_as_fallback_without_an_incident() -> None:
    world = World(links=links(2, 0))
    world.traffic[BANK] = Traffic(planned=100, lost=16)
    assert rules(world.tick()) == [("tenant", "tenant_off")]


def test_a_class_tries_its_other_drafter_at_once() -> None:
    other = ("bank", "default", "b")
    world = World(tenants={"bank": tenant(fallback_drafter="b")}, traffic={BANK: BAD})
    found = world.tick()
    assert rules(found) == [("class", "low_acceptance"), ("key", "switch"), ("key", "switch")]
    assert world.control.policy.drafters == {("bank", "default"): "b"}
    assert (world.policy(BANK).state, world.policy(other).state) == ("off", "probe")
    world.traffic = {other: Traffic(rounds=40_000)}
    assert world.until(other, "on") == 7
    world.traffic = {other: BAD}
    world.tick()
    assert world.control.policy.drafters == {}  # back to the first, which may be probed by now
    assert (world.policy(BANK).state, world.policy(other).state) == ("probe", "off")


@pytest.mark.parametrize("fallback", [None, "b"])
def test_a_drafter_that_only_wishes_or_the_load_ask_for_costs_the_class_nothing(fallback: str | None) -> None:
    other = ("bank", "default", "b")
    good, bad = Traffic(alpha=0.8), replace(BAD, rounds=3000)
    world = World(tenants={"bank": tenant(fallback_drafter=fallback)}, traffic={BANK: good, other: bad})
    assert rules(world.tick()) == [("key", "aside")]
    assert (world.policy(BANK), world.policy(other).state) == (FREE, "off")
    assert world.control.policy.drafters == {}


def test_without_another_drafter_left_the_class_is_off() -> None:
    world = World(tenants={"bank": tenant(fallback_drafter="b")}, traffic={BANK: BAD})
    world.tick()
    other = ("bank", "default", "b")
    world.traffic = {other: replace(BAD, rounds=40_000)}
    world.tick()
    assert world.policy(BANK).state == world.policy(other).state == "off"


def test_a_configured_drafter_that_recovered_is_used_again() -> None:
    other = ("bank", "default", "b")
    world = World(tenants={"bank": tenant(fallback_drafter="b")}, traffic={BANK: BAD})
    world.tick()
    world.traffic = {BANK: Traffic(rounds=40_000), other: Traffic(rounds=40_000)}
    world.until(BANK, "on")
    world.tick()
    assert world.control.policy.drafters == {}
    assert ("class", "promote") in rules(world.decisions)


def test_a_violation_turns_a_drafter_off_for_good_and_its_class_goes_on_with_another() -> None:
    world = World(tenants={"bank": tenant(fallback_drafter="b")}, traffic={BANK: Traffic()})
    world.tick()
    found = world.act(Order("violation", "bank", drafter="a", reason="KL 0.09 is above 0.05"))
    assert rules(found) == [("key", "integrity")]
    assert (world.policy(BANK).state, found[0].reason) == ("off", "KL 0.09 is above 0.05")
    assert rules(world.tick())[0] == ("class", "switch")
    world.tick(1000)
    assert world.policy(BANK).state == "off"
    world.act(Order("reset", "bank", drafter="a"))
    assert world.policy(BANK).state == "on"


def test_without_a_roll_back_a_violation_leaves_the_class_with_its_drafter() -> None:
    gate = {"quality_gate": {"rollback_on_violation": False}}
    world = World(tenants={"bank": tenant(fallback_drafter="b", speculation=gate)}, traffic={BANK: Traffic()})
    world.tick()
    world.act(Order("violation", "bank", drafter="a"))
    assert world.tick(20) == []
    assert (world.policy(BANK).state, world.control.policy.drafters) == ("off", {})


def test_a_drafter_without_a_worker_is_not_tried() -> None:
    down = (DraftLinks("bank", "b", 0),)
    world = World(tenants={"bank": tenant(fallback_drafter="b")}, traffic={BANK: Traffic()}, links=down)
    world.tick()
    world.traffic[BANK] = BAD
    assert rules(world.tick()) == [("class", "low_acceptance")]
    assert (world.policy(BANK).state, world.control.policy.drafters) == ("off", {})


def test_what_a_replica_lost_before_its_first_window_counts() -> None:
    world = World(links=links(1, 3))
    assert rules(world.tick()) == [("key", "availability")]


@pytest.mark.parametrize(("later", "decided"), [(3, []), (4, [("tenant", "tenant_off")])])
def test_lost_requests_are_excused_for_15_s(later: int, decided: list[tuple[str, str]]) -> None:
    """So many ticks after the incident, though the pool has another worker."""
    world = World(links=links(2, 0))
    world.tick()
    world.links = links(1, 1)
    assert world.tick(later) == []
    world.traffic[BANK] = Traffic(planned=100, lost=90)
    assert rules(world.tick()) == decided


CANARY = {"gamma": 4, "canary": {"drafter": "b", "share": 0.1}}


def test_a_canary_from_the_shadow_to_full_use() -> None:
    trial = ("bank", "default", "b")
    world = World(tenants={"bank": tenant(speculation=CANARY)}, traffic={BANK: Traffic()})
    assert (world.policy(trial).state, world.policy(trial).share) == ("shadow", 0.1)
    world.traffic[trial] = Traffic(rounds=40_000)
    assert world.tick(20) == []
    assert rules(world.act(Order("accept", "bank", drafter="b"))) == [("key", "rollout")]
    assert (world.policy(trial).state, world.policy(trial).share) == ("ramp", 0.1)
    assert world.control.policy.drafters == {}
    assert world.until(trial, "on") == 6
    world.tick()
    assert world.control.policy.drafters == {("bank", "default"): "b"}
    assert world.policy(BANK) == FREE
    assert world.tick(3) == []  # the one before, which is as good as ever, does not come back by itself
    world.act(Order("reset", "bank", drafter="b"))
    assert world.policy(trial).state == "on"  # no longer on trial


def test_a_rejected_canary_is_compared_anew_after_half_an_hour() -> None:
    trial = ("bank", "default", "b")
    world = World(tenants={"bank": tenant(speculation=CANARY)}, traffic={BANK: Traffic()})
    world.act(Order("reject", "bank", drafter="b"))
    assert world.policy(trial).state == "off"
    assert 324 <= world.until(trial, "shadow", ticks=400) <= 396


def test_a_bad_canary_hurts_nobody_else() -> None:
    trial = ("bank", "default", "b")
    world = World(tenants={"bank": tenant(speculation=CANARY)}, traffic={BANK: Traffic()})
    world.act(Order("accept", "bank", drafter="b"))
    world.traffic[trial] = replace(BAD, rounds=40_000, planned=400, fallbacks=120)
    assert rules(world.tick()) == [("key", "exit")]
    assert (world.policy(trial).state, world.policy(BANK)) == ("off", FREE)


def test_a_model_warms_up_for_half_an_hour() -> None:
    big = ("bank", "default", "big")
    world = World(tenants={"bank": tenant(drafter="big")}, traffic={big: replace(BAD, fallbacks=5)})
    found = world.tick(359)
    assert rules(found) == [("key", "warmup")]  # logged once
    assert (world.policy(big).state, world.policy(big).share) == ("warmup", 1.0)
    world.traffic[big] = Traffic()
    world.tick(2)
    assert world.policy(big) == FREE


def test_the_fallback_rate_counts_in_a_warm_up() -> None:
    big = ("bank", "default", "big")
    world = World(tenants={"bank": tenant(drafter="big")}, traffic={big: Traffic(planned=100, fallbacks=16)})
    assert ("tenant", "tenant_off") in rules(world.tick())


def test_synthetic_requests_tell_nothing() -> None:
    world = World(traffic={("bank", "warmup", "a"): replace(BAD, planned=100, fallbacks=90)})
    assert world.tick(20) == []


def test_plain_requests_tell_nothing() -> None:
    world = World(traffic={("bank", "default", None): Traffic(gamma=0, planned=0)})
    assert world.tick(20) == []


def test_the_operator() -> None:
    world = World()
    world.tick()
    assert rules(world.act(kill_switch(True))) == [("global", "operator")]
    assert not world.control.policy.speculation
    assert world.act(kill_switch(True)) == []
    world.act(kill_switch(False))
    assert world.control.policy.speculation
    world.act(Order("pin_off", "bank", reason="a customer asked"))
    assert world.policy(BANK).state == "pinned_off"
    assert world.tick(500) == []
    world.act(Order("unpin", "bank"))
    assert world.policy(BANK).state == "probe"
    world.act(Order("pin_off", "shop", "default"))
    assert world.policy(SHOP).state == "pinned_off"
    world.act(Order("pin_off", "shop", "default", "a"))
    world.act(Order("unpin", "shop", "default"))
    assert world.policy(SHOP).state == "pinned_off"


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (Order("pin_off", "nobody"), NotFound),
        (Order("pin_off", "bank", "long"), NotFound),
        (Order("pin_off", "bank", drafter="b"), NotFound),
        (Order("accept", "bank"), InvalidRequest),
        (Order("reset"), InvalidRequest),
    ],
)
def test_orders_that_make_no_sense(order: Order, error: type[Exception]) -> None:
    with pytest.raises(error):
        World().act(order)


def test_orders_before_any_traffic() -> None:
    world = World(traffic={})
    world.act(Order("pin_off", "bank", drafter="a"))
    world.act(Order("pin_off", "shop"))
    assert world.policy(BANK).state == world.policy(SHOP).state == "pinned_off"


def test_a_lost_pool_leaves_synthetic_keys_alone() -> None:
    synthetic = ("bank", "warmup", "a")
    world = World(traffic={synthetic: Traffic()}, links=links(1, 0))
    world.tick()
    world.links = links(0, 1)
    world.tick(8)
    assert world.policy(synthetic) == KeyPolicy("off")
    world.links = links(1, 1)
    world.tick()
    assert world.policy(synthetic) == FREE


def test_another_method_of_a_drafter_counts_for_keys_to_come() -> None:
    world = World()
    world.tick()
    world.control.employ(world.tenants, METHODS | {"a": "model"}, world.now)
    assert world.policy(BANK) == FREE
    world.act(Order("reset", "bank", drafter="a"))
    assert world.policy(BANK).state == "warmup"


def test_a_window_counts_once() -> None:
    control = Control({"bank": tenant()}, METHODS)
    few = window(1, {BANK: Traffic(rounds=60, alpha=0.05, planned=12, fallbacks=12)})
    control.fold(few)
    control.fold(few)
    assert control.tick(5.0) == ()
    control.fold(replace(few, source="another"))
    assert len(control.tick(10.0)) == 1


def test_what_nobody_configured_is_ignored() -> None:
    world = World(
        traffic={("x", "default", "a"): BAD, ("bank", "x", "a"): BAD, ("bank", "default", "x"): BAD}
    )
    assert world.tick(3) == []
    assert world.control.memory() == {}


def test_live_changes() -> None:
    world = World()
    world.traffic = {BANK: BAD, SHOP: BAD}
    world.tick()
    world.control.dirty()
    now, keep = world.now, world.tenants["bank"]
    world.control.employ({"bank": keep, "new": tenant(speculation=CANARY)}, METHODS, now)
    assert world.control.dirty() == {"shop", "new"}
    assert world.control.remembered("shop") is None
    assert (world.policy(BANK).state, world.policy(SHOP)) == ("off", FREE)
    assert world.policy(("new", "default", "b")).state == "shadow"
    new = ("new", "default", "a")
    world.traffic = {new: Traffic()}  # in the place of the tenant that went
    assert world.tick(3) == []
    changed = keep.model_copy(update={"weight": 2.0, "kv_share": 0.5})
    world.control.employ({"bank": changed}, METHODS, world.now)
    assert (world.control.policy.weights, world.control.policy.kv_shares) == ({"bank": 2.0}, {"bank": 0.5})
    assert world.policy(BANK).state == "off"


def test_a_tenant_that_comes_again_begins_anew() -> None:
    """Also when requests of the one before end after it went."""
    world = World()
    world.traffic = {BANK: BAD}
    world.tick()
    ended = Finished(
        "bank", "default", "a", "on", False, "stop", None, 0, 10, 0, 99,
        SpeculationStats(tested=50, first_accepted=5, tries=(50,), first_hits=5)
    )  # fmt: skip
    for tenants in (world.tenants, {}, world.tenants):
        world.control.employ(tenants, METHODS, world.now)
        late = replace(window(world.number + 1, {BANK: BAD}), finished=(ended,) * (not tenants))
        world.number += 1
        world.now += 5.0
        if not tenants:
            world.control.fold(late)
            assert world.control.tick(world.now) == ()
    assert world.policy(BANK) == FREE
    assert world.control.remembered("bank") is None
    (seen,) = [one for one in world.control.overview(world.now, 9)["tenants"] if one["tenant"] == "bank"]
    assert (seen["state"], seen["classes"], seen["ttft_ms"]["p50"]) == ("on", [], None)


def test_the_place_of_a_key_that_went_holds_nothing_of_it() -> None:
    """Too few tokens to decide by, but they would have been enough together with the next key's."""
    new = ("new", "default", "a")
    world = World(tenants={"shop": tenant()}, traffic={SHOP: Traffic(rounds=140, alpha=0.05)})
    assert world.tick() == []
    world.control.employ({"new": tenant()}, METHODS, world.now)
    world.traffic = {new: Traffic(rounds=30, alpha=0.7, gamma=4)}
    assert world.tick(3) == []


def test_a_bad_canary_does_not_spoil_its_tenants_probe() -> None:
    trial = ("bank", "default", "b")
    world = World(tenants={"bank": tenant(speculation=CANARY)}, traffic={BANK: Traffic()})
    world.act(Order("accept", "bank", drafter="b"))
    world.act(Order("pin_off", "bank"))
    world.act(Order("unpin", "bank"))
    world.traffic = {BANK: Traffic(rounds=10_000), trial: replace(BAD, rounds=40_000, cost=1.0)}
    world.tick(2)
    tenants = [one for one in world.decisions if one.level == "tenant"]
    assert [one.new.state for one in tenants] == ["pinned_off", "probe", "ramp"]


def test_a_drafter_that_is_no_longer_configured_is_not_used() -> None:
    world = World(tenants={"bank": tenant(fallback_drafter="b")}, traffic={BANK: BAD})
    world.tick()
    decided = world.control.employ({"bank": tenant()}, METHODS, world.now)
    assert rules(list(decided)) == [("class", "operator")]
    assert world.control.policy.drafters == {}


def test_what_is_remembered_travels() -> None:
    world = World()
    world.traffic[BANK] = BAD
    world.tick()
    memory, switch = pickle.loads(pickle.dumps((world.control.memory(), world.control.switch)))
    again = Control(world.tenants, METHODS, memory=memory, switch=switch, now=world.now)
    assert again.memory() == world.control.memory()
    assert again.policy.keys == world.control.policy.keys
    assert again.policy.version > world.control.policy.version


def test_the_overview_is_json() -> None:
    world = World()
    world.traffic[BANK] = BAD
    world.tick(3)
    tree = json.loads(json.dumps(world.control.overview(world.now, 1), allow_nan=False))
    everything = world.control.overview(world.now + 60, 10)
    assert [one["tenant"] for one in tree["tenants"]] == ["shop"]
    assert [one["state"] for one in everything["tenants"][1]["classes"]] == ["off"]
    assert everything["controller"] == {"state": "silent", "age_s": 60.0}
    assert everything["tenants"][0]["alpha"] == pytest.approx(0.7)
    assert everything["tenants"][0]["tokens_per_s"] == pytest.approx(200 * 2.7731 / 5)
    assert everything["decisions"][0]["rule"] == "low_acceptance"


TRAFFICS = st.builds(
    Traffic, rounds=st.sampled_from([0, 50, 200, 4000, 40_000]),
    alpha=st.sampled_from([0.05, 0.25, 0.5, 0.7, 0.9]),
    cost=st.sampled_from([0.05, 0.4]), planned=st.sampled_from([0, 10, 100]),
)  # fmt: skip
ORDERS = st.builds(
    Order, st.sampled_from(["pin_off", "unpin", "reset", "accept", "reject", "violation"]), st.just("bank"),
    st.none(), st.sampled_from(["a", "b", "c"]),
)  # fmt: skip
THREE = {"a": "ngram", "b": "ngram", "c": "ngram"}
KEYS: list[Key] = [(name, "default", drafter) for name in ("bank", "shop") for drafter in THREE]
STEPS = st.lists(
    st.tuples(st.dictionaries(st.sampled_from(KEYS), TRAFFICS), st.integers(0, 20), st.none() | ORDERS,
              st.integers(0, 2), st.integers(1, 12)),
    min_size=1, max_size=12,
)  # fmt: skip
CONFIGURED = {
    "bank": tenant(
        fallback_drafter="b", speculation={"gamma": 8, "tree_width": 2, "canary": {"drafter": "c"}}
    ),
    "shop": tenant(fallback_drafter="b", warmup_s=60.0, speculation={"gamma": 4, "canary": {"drafter": "c"}}),
}


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_whatever_happens(steps: list[tuple[dict[Key, Traffic], int, Order | None, int, int]]) -> None:
    """Each record follows from its inputs, nobody leaves OFF early, the policy is that of all units."""
    world = World(tenants=CONFIGURED, traffic={})
    for traffic, percent, order, workers, ticks in steps:
        world.traffic |= {
            key: replace(one, fallbacks=one.planned * percent // 100) for key, one in traffic.items()
        }
        world.links = links(workers, 0)
        if order is not None:
            world.act(order)
        world.tick(ticks)
        fresh = Publisher(0)
        fresh.publish(world.control._book, list(CONFIGURED), [], world.control._down, 8, True)
        assert world.control.policy.keys == fresh.policy.keys
        assert world.control.policy.drafters == fresh.policy.drafters
    assert replay([json.loads(json.dumps(record(one))) for one in world.decisions]) == []
    _assert_calm(world.decisions)


def _assert_calm(decisions: list[Decision]) -> None:
    """Between two OFFs of a unit lies the first one's delay; orders and lost pools alone cut it short."""
    fell: dict[Any, Decision] = {}
    for one in decisions:
        unit = (one.level, one.key)
        if one.rule in ("operator", "integrity", "availability", "rollout"):
            fell.pop(unit, None)
        elif one.new.state == "off" and one.old.state not in STOPPED:
            before = fell.get(unit)
            assert before is None or one.time - before.time >= 0.9 * before.new.delay_s
            fell[unit] = one


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.05, 0.25, 0.6, 0.8]), min_size=4, max_size=40),
    st.lists(st.sampled_from([0, 4, 6, 11, 16]), min_size=4, max_size=40), st.integers(0, 39),
)  # fmt: skip
def test_a_restart_at_any_tick_changes_no_later_decision(
    alphas: list[float], rates: list[int], killed: int
) -> None:
    """As long as each tick tells enough by itself."""
    first = Control(CONFIGURED, METHODS | THREE, now=0.0)
    other = first
    for tick, (alpha, percent) in enumerate(zip(alphas, rates, strict=False), 1):
        told = {key: Traffic(50_000, alpha, 8, planned=100, fallbacks=percent) for key in KEYS}
        decided = []
        for control in dict.fromkeys((first, other)):
            control.fold(window(tick, told))
            decided.append([record(one) for one in control.tick(tick * 5.0)])
        assert decided[0] == decided[-1]
        if tick == killed:
            other = Control(CONFIGURED, METHODS | THREE, 5.0, first.memory(), first.switch, tick * 5.0)
    assert first.memory() == other.memory()
    assert first.policy.keys == other.policy.keys
