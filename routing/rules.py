"""The rules of math.md section 5. `decide` is the only one who changes a unit, and it is pure.

Each rule gives the unit as it shall be, or None where it does not apply; the first that applies wins. With
what is unknown (nan) no comparison holds, so a rule without its evidence does not apply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gammaray.routing.counting import (
    CLEAN_FR,
    CONTRACT_FR,
    GOOD_S,
    INCIDENTS,
    INCIDENTS_S,
    SLOW_TICKS,
    count,
    too_low,
)
from gammaray.routing.exits import leave
from gammaray.routing.orders import obey
from gammaray.routing.states import SERVING, STOPPED, Facts, Limits, Unit, Widths, enter, fall
from gammaray.types import FREE

Rule = Callable[[Unit, Facts, Limits, float], Unit | None]

EMERGENCY_FR = 0.10
EMERGENCY_S = 30.0
UNHEALTHY_S = 30.0
WIDTH_S = 300.0  # between two widths
WIDTH_KEPT_S = 3600.0  # what was measured longer ago may hold no more
MOST_GAMMA = 8  # of rule 7


def decide(unit: Unit, facts: Facts, limits: Limits, now: float) -> tuple[Unit, str]:
    """The unit at the next tick, and the name of the rule that changed it; "" if none did."""
    if facts.action:
        return obey(unit, facts, limits, now)
    if unit.state == "pinned_off":
        return unit, ""
    unit = count(unit, facts, limits, now)
    for name, rule in RULES[limits.level]:
        if (after := rule(unit, facts, limits, now)) is not None:
            return after, name
    return unit, ""


def availability(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """Rule 2. Who lost all workers is probed as soon as there is one again."""
    if unit.state in STOPPED:
        return None
    if len(unit.incidents) >= INCIDENTS:
        reason = f"{INCIDENTS} draft workers were lost within {INCIDENTS_S / 60:g} minutes"
        return fall(unit, limits, now, reason)
    if unit.unhealthy is not None and now - unit.unhealthy >= UNHEALTHY_S:
        reason = f"no draft worker has been healthy for {UNHEALTHY_S:g} s"
        return enter(unit, "off", now, reason, until=now, incidents=())
    return None


def tenant_off(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """Rule 3."""
    if unit.state not in ("on", "probe", "ramp") or not facts.fr_all > limits.fr_off:
        return None
    reason = f"fallback rate {facts.fr_all:.3f} is above {limits.fr_off:g}"
    return fall(unit, limits, now, reason)


def class_low(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """Rule 4: another drafter is tried at once, else the class decodes plainly."""
    if unit.state != "on" or not too_low(unit, facts, limits):
        return None
    reason = f"acceptance {facts.alpha:.3f} is too low"
    if facts.other is None:
        return fall(unit, limits, now, reason)
    return enter(unit, "on", now, f"{reason}; {facts.other} is tried", drafter=facts.other)


def key_bad(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """Rules 4 and 6 of a drafter beside the one that its class uses: it goes, and the class stays."""
    if not facts.aside or unit.state not in SERVING:
        return None
    if too_low(unit, facts, limits):
        return fall(unit, limits, now, f"acceptance {facts.alpha:.3f} is too low")
    if unit.state == "contract" and unit.slow >= SLOW_TICKS:
        reason = f"speed-up stays below 1 (at most {facts.s_high:.3f}) with short chains"
        return fall(unit, limits, now, reason)
    return None


def emergency(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """Rule 5."""
    if unit.state != "on" or facts.falling or not facts.fr > EMERGENCY_FR:
        return None
    reason = f"fallback rate {facts.fr:.3f} is above {EMERGENCY_FR:g}"
    return enter(unit, "emergency", now, reason, until=now + EMERGENCY_S)


def contract(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """Rule 6, first half: a chain, of the best depth."""
    slow, falls = unit.slow >= SLOW_TICKS, facts.fr > CONTRACT_FR
    if unit.state != "on" or not (slow or falls):
        return None
    reason = (
        f"speed-up is below 1 (at most {facts.s_high:.3f}) for {unit.slow} ticks"
        if slow
        else f"fallback rate {facts.fr:.3f} is above {CONTRACT_FR:g}"
    )
    gamma = facts.best if limits.adaptive and facts.best else unit.gamma
    return enter(unit, "contract", now, reason, gamma=gamma, width=1)


def class_slow(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """Rule 6, second half: contracting did not help."""
    if unit.state != "on" or unit.slow < SLOW_TICKS:
        return None
    reason = f"speed-up stays below 1 (at most {facts.s_high:.3f}) with short chains"
    return fall(unit, limits, now, reason)


def switch(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """The drafter in use is off."""
    if unit.state != "on" or not facts.broken or facts.other is None:
        return None
    return enter(unit, "on", now, f"the drafter in use is off; {facts.other} is tried", drafter=facts.other)


def promote(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """Another drafter has passed its trial."""
    if unit.state != "on" or facts.ready is None:
        return None
    return enter(unit, "on", now, f"{facts.ready} has passed its trial", drafter=facts.ready)


def adapt(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """Rule 7: depth one step a tick, width one step in five minutes."""
    pays = facts.s_low > GOOD_S and not facts.fr >= CLEAN_FR
    if unit.state != "on" or not limits.adaptive or not pays:
        return None
    gamma = step(min(unit.gamma, limits.gamma), min(facts.best, MOST_GAMMA) or unit.gamma, limits.gamma)
    width, widths = _wider(unit, facts, limits, now)
    ceilings = gamma if gamma < limits.gamma else FREE.gamma, width if width < limits.width else FREE.width
    if (*ceilings, widths) == (unit.gamma, unit.width, unit.widths):
        return None
    moves = ceilings != (unit.gamma, unit.width)
    reason = f"depth {gamma} and width {width} are nearer to the best" if moves else unit.reason
    return replace(unit, gamma=ceilings[0], width=ceilings[1], widths=widths, reason=reason)


def step(value: int, wanted: int, most: int) -> int:
    """One nearer."""
    return min(most, value + (wanted > value) - (wanted < value))


def _wider(unit: Unit, facts: Facts, limits: Limits, now: float) -> tuple[int, Widths]:
    """Notes S at this width, then tries a neighbour that is unknown, or takes the best of those known."""
    here = min(unit.width, limits.width)
    if limits.width == 1 or now - unit.looked < WIDTH_S:
        return here, unit.widths
    known = {width: (s, at) for width, s, at in unit.widths if now - at < WIDTH_KEPT_S}
    known[here] = facts.s, now
    near = [width for width in (here - 1, here, here + 1) if 1 <= width <= limits.width]
    unknown = [width for width in near if width not in known]
    best = unknown[0] if unknown else max(near, key=lambda width: known[width][0])
    return best, tuple((width, s, at) for width, (s, at) in sorted(known.items()))


def logged(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit | None:
    """What would act outside the warm-up is told once."""
    if unit.state != "warmup" or unit.noted:
        return None
    if not (too_low(unit, facts, limits) or unit.slow >= SLOW_TICKS or facts.fr > CONTRACT_FR):
        return None
    reason = f"warming up: acceptance {facts.alpha:.3f}, speed-up {facts.s:.3f}, fallback rate {facts.fr:.3f}"
    return replace(unit, noted=True, reason=reason)


RULES: dict[str, tuple[tuple[str, Rule], ...]] = {
    "global": (),
    "tenant": (("tenant_off", tenant_off), ("emergency", emergency), ("exit", leave)),
    "class": (
        ("low_acceptance", class_low),
        ("slow", class_slow),
        ("promote", promote),
        ("switch", switch),
        ("exit", leave),
    ),
    "key": (
        ("availability", availability),
        ("aside", key_bad),
        ("exit", leave),
        ("contract", contract),
        ("adapt", adapt),
        ("warmup", logged),
    ),
}
