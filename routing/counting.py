"""Ticks in a row that fulfil a condition, and what makes one (math.md section 5)."""

from __future__ import annotations

from dataclasses import replace

from gammaray.routing.states import Facts, Limits, Unit

GOOD_S = 1.05  # the lower bound of S above it: speculation pays
COLLAPSED_ALPHA = 0.20  # one tick is enough
LOW_TICKS, SLOW_TICKS = 2, 3
CONTRACT_FR, CLEAN_FR = 0.05, 0.03
INCIDENTS, INCIDENTS_S = 3, 300.0  # so many lost workers in so long
MOST_TICKS = 3  # that are counted


def count(unit: Unit, facts: Facts, limits: Limits, now: float) -> Unit:
    """Ticks in a row, as far as this one tells; and what is known of the pool."""
    slow_counts = limits.level == "key" or facts.contracted or unit.state == "ramp"
    streaks = (
        _streak(unit.low, facts.alpha, low(facts, limits)),
        _streak(unit.slow, facts.s_high, facts.s_high < 1.0) if slow_counts else 0,
        _streak(unit.clean, facts.s_low, clean(unit, facts)),
    )
    incidents, unhealthy = _incidents(unit, facts, now), _unhealthy(unit, facts, now)
    before = (unit.low, unit.slow, unit.clean), unit.incidents, unit.unhealthy
    if before == (streaks, incidents, unhealthy):
        return unit
    low_, slow, clean_ = streaks
    return replace(unit, low=low_, slow=slow, clean=clean_, incidents=incidents, unhealthy=unhealthy)


def low(facts: Facts, limits: Limits) -> bool:
    """Too little is accepted. What pays nevertheless may go on."""
    return facts.alpha < limits.alpha_floor and not facts.s_low > GOOD_S


def too_low(unit: Unit, facts: Facts, limits: Limits) -> bool:
    """In one tick by far, or in two; `unit` has counted this tick."""
    return low(facts, limits) and (facts.alpha < COLLAPSED_ALPHA or unit.low >= LOW_TICKS)


def clean(unit: Unit, facts: Facts) -> bool:
    """A tick that counts towards the next better state."""
    most = CONTRACT_FR if unit.state == "ramp" else CLEAN_FR
    return unit.state in ("ramp", "contract") and facts.s_low > GOOD_S and not facts.fr >= most


def _streak(ticks: int, known: float, holds: bool) -> int:
    if known != known:
        return ticks
    return min(ticks + 1, MOST_TICKS) if holds else 0


def _incidents(unit: Unit, facts: Facts, now: float) -> tuple[float, ...]:
    if not unit.incidents and not facts.incidents:
        return ()
    recent = tuple(at for at in unit.incidents if now - at < INCIDENTS_S)
    return (recent + (now,) * min(facts.incidents, INCIDENTS))[-INCIDENTS:]


def _unhealthy(unit: Unit, facts: Facts, now: float) -> float | None:
    if facts.workers is None:
        return unit.unhealthy
    if facts.workers > 0:
        return None
    return now if unit.unhealthy is None else unit.unhealthy
