"""What others ask of a unit: the operator, the judge of a rollout, the quality gate, the level above."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gammaray.routing.exits import begin, probe, warm_up
from gammaray.routing.states import LONGEST_DELAY_S, STOPPED, Action, Facts, Limits, Unit, enter, fall


@dataclass(frozen=True, slots=True)
class Order:
    """`pin_off`, `unpin` or `reset` of everything, a tenant, a class of it, or a drafter (in all classes
    unless one is named). `accept`, `reject` and `violation` are of a drafter."""

    action: Action
    tenant: str | None = None  # None: everything, which pinned off is the kill switch
    request_class: str | None = None
    drafter: str | None = None
    reason: str = ""


def kill_switch(on: bool, reason: str = "") -> Order:
    """`on`: nobody speculates."""
    return Order("pin_off" if on else "unpin", reason=reason)


def obey(unit: Unit, facts: Facts, limits: Limits, now: float) -> tuple[Unit, str]:
    """The unit as asked, and the rule; unchanged where the order does not apply to its state."""
    rule, carry_out = ORDERS[facts.action]
    after = carry_out(unit, facts, limits, now)
    return (unit, "") if after is None else (after, rule)


def _pin_off(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    if unit.state == "pinned_off":
        return None
    return enter(unit, "pinned_off", now, facts.note or "pinned off by the operator")


def _unpin(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """The kill switch releases at once, everything else is probed."""
    if unit.state != "pinned_off":
        return None
    reason = facts.note or "unpinned by the operator"
    return enter(unit, "on", now, reason) if limits.level == "global" else probe(unit, now, reason)


def _reset(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """As if it had just been seen first; its epochs go on."""
    reason = facts.note or "reset by the operator"
    anew = replace(
        Unit(born=unit.born), epoch=unit.epoch + (unit.state not in STOPPED), unhealthy=unit.unhealthy
    )
    return begin(anew, facts, limits, now, reason)


def _violation(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """Rule 1: until the operator resets it. A new version of the drafter is another key."""
    if unit.state == "pinned_off":
        return None
    return enter(unit, "off", now, facts.note or "state or output differed from plain decoding")


def _accept(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    if unit.state != "shadow":
        return None
    return warm_up(unit, facts, limits, now, facts.note or "accepted in the shadow")


def _reject(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """It is compared anew after the longest delay."""
    if unit.state != "shadow":
        return None
    rejected = replace(unit, delay_s=LONGEST_DELAY_S)
    return fall(rejected, limits, now, facts.note or "rejected in the shadow")


def _fall(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    if unit.state in ("off", "pinned_off"):
        return None
    return fall(unit, limits, now, facts.note)


def _probe(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    return None if unit.state in STOPPED else probe(unit, now, facts.note)


ORDERS: dict[str, tuple[str, Callable[[Unit, Facts, Limits, float], Unit | None]]] = {
    "pin_off": ("operator", _pin_off),
    "unpin": ("operator", _unpin),
    "reset": ("operator", _reset),
    "violation": ("integrity", _violation),
    "accept": ("rollout", _accept),
    "reject": ("rollout", _reject),
    "fall": ("switch", _fall),
    "probe": ("switch", _probe),
}
