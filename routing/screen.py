"""Which units a tick may change: most stay as they are, and need no look."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gammaray.routing.counting import (
    CLEAN_FR,
    COLLAPSED_ALPHA,
    CONTRACT_FR,
    GOOD_S,
    LOW_TICKS,
    MOST_TICKS,
    SLOW_TICKS,
)
from gammaray.routing.evidence import Rows
from gammaray.routing.exits import PROBE_TESTED, STAGE_TESTED
from gammaray.routing.facts import Columns
from gammaray.routing.rules import EMERGENCY_FR, MOST_GAMMA, WIDTH_S
from gammaray.routing.states import Level
from gammaray.routing.units import CODES, Units

Mask = NDArray[np.bool_]


def screen(level: Level, units: Units[Any], columns: Columns, now: float) -> Rows:
    """Places, ascending. For rules 3 to 6 and the exits."""
    state = {name: units.column("state") == code for name, code in CODES.items()}
    low = (columns.alpha < units.column("floor")) & ~(columns.s_low > GOOD_S)
    too_low = low & ((columns.alpha < COLLAPSED_ALPHA) | (units.column("low") >= LOW_TICKS - 1))
    slow = columns.s_high < 1.0
    too_slow = slow & (units.column("slow") >= SLOW_TICKS - 1)
    due = state["probe"] & (columns.tested >= PROBE_TESTED) | _over(units, state, columns, now)
    due |= _counts(units, columns, level, low, slow, state)
    due |= state["ramp"] & (too_low | too_slow | (columns.fr > CONTRACT_FR))
    due |= state["shadow"] & ~units.column("candidate")
    if level == "tenant":
        due |= (state["on"] | state["probe"] | state["ramp"]) & (columns.fr_all > units.column("fr_off"))
        due |= state["on"] & (columns.fr > EMERGENCY_FR)
    if level == "class":
        due |= state["on"] & (too_low | units.column("eager"))
    if level == "key":
        due |= (state["on"] | state["warmup"] & ~units.column("noted")) & (
            too_slow | (columns.fr > CONTRACT_FR)
        )
        due |= state["warmup"] & ~units.column("noted") & too_low
        due |= units.column("aside") & (
            (state["on"] | state["contract"]) & too_low | state["contract"] & too_slow
        )
    return np.flatnonzero(due & units.column("used"))


def falling(classes: Units[Any], columns: Columns) -> Rows:
    """Tenants with a class that rule 4 applies to."""
    low = (columns.alpha < classes.column("floor")) & ~(columns.s_low > GOOD_S)
    too_low = low & ((columns.alpha < COLLAPSED_ALPHA) | (classes.column("low") >= LOW_TICKS - 1))
    return np.unique(classes.column("owner")[too_low & classes.within(["on"]) & classes.column("used")])


def _over(units: Units[Any], state: dict[str, Mask], columns: Columns, now: float) -> Mask:
    """The time of its state is over, and it can be judged."""
    ready = state["off"] & units.column("healthy") | state["emergency"] | state["warmup"]
    ready |= state["probe"] & (columns.tested > 0)
    ready |= state["ramp"] & (~np.isnan(columns.s_low) | (columns.tested >= STAGE_TESTED))
    over: Mask = past(units, now) & ready
    return over


def past(units: Units[Any], now: float) -> Mask:
    """exits.over of all."""
    until = units.column("until")
    found: Mask = np.isfinite(until) & ((until <= now) | (units.column("since") > now))
    return found


def _counts(
    units: Units[Any], columns: Columns, level: Level, low: Mask, slow: Mask, state: dict[str, Mask]
) -> Mask:
    """A streak goes on or breaks."""
    most = np.where(state["ramp"], CONTRACT_FR, CLEAN_FR)
    clean = (state["ramp"] | state["contract"]) & (columns.s_low > GOOD_S) & ~(columns.fr >= most)
    counted = state["ramp"] | (level == "key") | units.column("contracted")
    changes = _moves(units.column("low"), ~np.isnan(columns.alpha), low)
    changes |= counted & _moves(units.column("slow"), ~np.isnan(columns.s_high), slow)
    changes |= ~counted & (units.column("slow") > 0)
    changes |= _moves(units.column("clean"), ~np.isnan(columns.s_low), clean)
    alive: Mask = ~state["pinned_off"] & changes
    return alive


def _moves(ticks: NDArray[np.int8], known: Mask, holds: Mask) -> Mask:
    moves: Mask = known & np.where(holds, ticks < MOST_TICKS, ticks > 0)
    return moves


def adapting(keys: Units[Any], columns: Columns, now: float) -> Rows:
    """Keys, ascending, for which rule 7 has a better shape, or looks for one."""
    pays = keys.column("adaptive") & (columns.s_low > GOOD_S) & ~(columns.fr >= CLEAN_FR)
    wanted = np.minimum(np.minimum(columns.best, MOST_GAMMA), keys.column("most"))
    deeper = (columns.best > 0) & (wanted != keys.column("gamma"))
    looks = now - keys.column("resized") >= WIDTH_S
    return np.flatnonzero(keys.column("used") & keys.within(["on"]) & pays & (deeper | looks))
