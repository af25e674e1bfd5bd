"""How a unit leaves a state that is not ON (math.md section 5, exits): the same on every level."""

from __future__ import annotations

from collections.abc import Callable

from gammaray.routing.counting import CONTRACT_FR, GOOD_S, SLOW_TICKS, too_low
from gammaray.routing.states import Facts, Limits, Unit, enter, fall
from gammaray.types import FREE

PROBE_SHARE, PROBE_TESTED, PROBE_S = 0.02, 512, 600.0
STAGES = (0.1, 0.5, 1.0)  # shares of RAMP
STAGE_TICKS, STAGE_S, STAGE_TESTED = 2, 600.0, 200
CONTRACT_TICKS = 3


def leave(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """None: it stays."""
    exit = EXITS.get(unit.state)
    return exit(unit, facts, limits, now) if exit else None


def over(unit: Unit, now: float) -> bool:
    """Also once the clock was set back to before the state began: nobody waits for it to come there again."""
    return unit.until is not None and not unit.since <= now < unit.until


def probe(unit: Unit, now: float, reason: str) -> Unit:
    return enter(unit, "probe", now, reason, share=PROBE_SHARE, until=now + PROBE_S)


def ramp(unit: Unit, share: float, now: float, reason: str) -> Unit:
    return enter(unit, "ramp", now, reason, share=share, until=now + STAGE_S)


def begin(unit: Unit, facts: Facts, limits: Limits, now: float, reason: str) -> Unit:
    """A key's first state: a candidate's is the shadow, and whoever needs it warms up."""
    if facts.candidate:
        return enter(unit, "shadow", now, reason, share=limits.trial_share)
    return warm_up(unit, facts, limits, now, reason)


def warm_up(unit: Unit, facts: Facts, limits: Limits, now: float, reason: str) -> Unit:
    """Of a candidate on the share of its trial."""
    if limits.warmup_s:
        share = limits.trial_share if facts.candidate else 1.0
        return enter(unit, "warmup", now, reason, share=share, until=now + limits.warmup_s)
    return _warm(unit, facts, now, reason)


def _warm(unit: Unit, facts: Facts, now: float, reason: str) -> Unit:
    return ramp(unit, STAGES[0], now, reason) if facts.candidate else enter(unit, "on", now, reason)


def _off(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """A candidate goes back into the shadow. Without a healthy worker nothing can be probed."""
    if not over(unit, now) or unit.unhealthy is not None:
        return None
    if facts.candidate:
        return begin(unit, facts, limits, now, "its time off is over; it is compared anew")
    return probe(unit, now, "its time off is over")


def _emergency(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    return probe(unit, now, "the emergency's time is over") if over(unit, now) else None


def _probe(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """Judged by all since it began; one that nobody used goes on."""
    if facts.tested < (1 if over(unit, now) else PROBE_TESTED):
        return None
    passed, found = _tried(facts)
    return ramp(unit, STAGES[0], now, found) if passed else fall(unit, limits, now, f"probe failed: {found}")


def _tried(facts: Facts) -> tuple[bool, str]:
    """Whether all that was seen since the state began speaks for it, and what that is."""
    passed = facts.probe_low > GOOD_S and not facts.probe_fr >= CONTRACT_FR
    found = f"{facts.tested:.0f} tested tokens: speed-up at least {facts.probe_low:.3f}"
    return passed, found + (
        "" if facts.probe_fr != facts.probe_fr else f", fallback rate {facts.probe_fr:.3f}"
    )


def _ramp(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """By ticks; where traffic is too thin for a tick to tell anything, a long stage is judged as a whole."""
    found = f"acceptance {facts.alpha:.3f}, speed-up at least {facts.s_low:.3f}, fallback rate {facts.fr:.3f}"
    bad = unit.slow >= SLOW_TICKS or facts.fr > CONTRACT_FR or too_low(unit, facts, limits)
    undecided = over(unit, now) and unit.clean == 0 and facts.s_low == facts.s_low
    if bad or undecided:
        return fall(unit, limits, now, f"ramp failed: {found}")
    if unit.clean < STAGE_TICKS:
        if not over(unit, now) or facts.tested < STAGE_TESTED:
            return None
        passed, found = _tried(facts)
        if not passed:
            return fall(unit, limits, now, f"ramp failed: {found}")
    larger = [share for share in STAGES if share > unit.share]
    return ramp(unit, larger[0], now, found) if larger else enter(unit, "on", now, found, settled=now)


def _warm_up(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    if not over(unit, now):
        return None
    if facts.s_high < 1.0:
        reason = f"speed-up is below 1 (at most {facts.s_high:.3f}) when warm"
        return fall(unit, limits, now, reason)
    return _warm(unit, facts, now, "it is warm")


def _shadow(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """Whoever is in use needs no comparison; a candidate waits for its judge."""
    return None if facts.candidate else warm_up(unit, facts, limits, now, "it is no longer on trial")


def _contract(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """An adaptive key grows from where it is (rule 7)."""
    if unit.clean < CONTRACT_TICKS:
        return None
    shape = {} if limits.adaptive else {"gamma": FREE.gamma, "width": FREE.width}
    return enter(unit, "on", now, f"speed-up is at least {facts.s_low:.3f} again", **shape)


EXITS: dict[str, Callable[[Unit, Facts, Limits, float], Unit | None]] = {
    "off": _off,
    "emergency": _emergency,
    "probe": _probe,
    "ramp": _ramp,
    "shadow": _shadow,
    "warmup": _warm_up,
    "contract": _contract,
}
