"""What the rules of math.md section 5 look at and what they give: plain, frozen values.

A unit is a tenant, a class of it, or a key (a drafter in a class). All three live by the same states.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Any, Literal

from gammaray.types import FREE, State

Level = Literal["global", "tenant", "class", "key"]
Widths = tuple[tuple[int, float, float], ...]  # (width, S measured with it, when)
Action = Literal["", "pin_off", "unpin", "reset", "violation", "accept", "reject", "fall", "probe"]

FIRST_DELAY_S, LONGEST_DELAY_S = 30.0, 1800.0  # from OFF to PROBE; doubles
JITTER = 0.1  # of a delay, both ways: units that fell together do not probe together
STEADY_S = 1800.0  # ON for so long (or for its own delay, if longer) a unit has a clean record again
STOPPED = ("emergency", "off", "pinned_off")
SERVING = ("on", "contract")  # what keys do in these states tells of their class and tenant


@dataclass(frozen=True, slots=True)
class Unit:
    """What must outlive a tick, and a restart of the controller. Times in seconds, on the clock of `now`."""

    state: State = "on"
    born: float = 0.0  # when it was seen first
    since: float = 0.0
    until: float | None = None  # when the state may end by itself: off, emergency, probe, ramp and warm-up
    delay_s: float = 0.0  # of the last OFF, before its jitter; 0: it never was
    settled: float | None = None  # since when it is ON, or contracted, after a ramp; None: never ramped
    share: float = 1.0  # of the requests that may speculate
    gamma: int = FREE.gamma  # ceilings of a key
    width: int = FREE.width
    drafter: str | None = None  # of a class: the one it was switched to; None: the configured one
    low: int = 0  # ticks in a row with too low an acceptance
    slow: int = 0  # ... with the upper bound of S below 1
    clean: int = 0  # ... that allow the next better state
    incidents: tuple[float, ...] = ()  # when workers were lost in the last minutes
    unhealthy: float | None = None  # since when no worker is healthy
    widths: Widths = ()
    epoch: int = 0  # how often it was turned off
    noted: bool = False  # in this warm-up a rule that does not act then has been logged
    reason: str = ""

    @property
    def looked(self) -> float:
        """When the width was looked at last."""
        return max([self.since, *(at for _, _, at in self.widths)])

    @property
    def decided(self) -> tuple[object, ...]:
        """What others act upon; the rest is counting."""
        shape = self.share, self.gamma, self.width, self.drafter
        return self.state, self.since, self.until, shape, self.epoch, self.noted


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a unit at a tick; nan: too little, so that no comparison holds.

    Rates are of the window: the newest ticks that hold enough, all since the unit's last transition.
    """

    alpha: float = math.nan
    s: float = math.nan
    s_low: float = math.nan
    s_high: float = math.nan
    fr: float = math.nan  # of a tenant without keys on trial or in their warm-up
    fr_all: float = math.nan  # of a tenant with the warm-ups
    best: int = 0  # the depth with the best S, as measured; 0: unknown
    tested: float = 0.0  # tokens, since the last transition; so are the next two
    probe_low: float = math.nan  # lower bound of S at the best depth
    probe_fr: float = math.nan
    workers: int | None = None  # healthy ones of the key's pool; None: it has none, or is not known
    incidents: int = 0  # since the last tick
    falling: bool = False  # of a tenant: rule 4 applies to one of its classes, and comes first
    contracted: bool = False  # of a class: the key in use is in CONTRACT
    broken: bool = False  # of a class: the key in use is off
    other: str | None = None  # of a class: another drafter that may be tried
    ready: str | None = None  # of a class: the drafter on trial, its ramp being over
    candidate: bool = False  # of a key: on trial beside the one in use
    aside: bool = False  # of a key: its class uses another drafter; a wish or the load asks for this one
    action: Action = ""  # what the operator, the rollout or another level asks for
    note: str = ""  # ... and why


@dataclass(frozen=True, slots=True)
class Limits:
    """What the configuration says of a unit."""

    level: Level = "key"
    name: str = ""  # of the unit: decides its jitter
    gamma: int = 4
    width: int = 1
    adaptive: bool = True
    alpha_floor: float = 0.3
    fr_off: float = 0.15
    warmup_s: float = 0.0
    trial_share: float = 1.0  # of requests, of a candidate


@dataclass(frozen=True, slots=True)
class TenantMemory:
    """The units of one tenant."""

    tenant: Unit = Unit()
    classes: tuple[tuple[str, Unit], ...] = ()
    keys: tuple[tuple[str, str, Unit], ...] = ()  # class, drafter, unit


@dataclass(frozen=True, slots=True)
class GlobalMemory:
    """The kill switch (pinned off: nobody speculates), and the version of the last policy."""

    unit: Unit = Unit()
    version: int = 0


def enter(unit: Unit, state: State, now: float, reason: str, **changes: Any) -> Unit:
    """A transition: counts, share and end begin anew, and being stopped begins an epoch."""
    stops = state in STOPPED and unit.state not in STOPPED
    anew: dict[str, Any] = {"until": None, "share": 1.0, "low": 0, "slow": 0, "clean": 0, "noted": False}
    anew |= {"state": state, "since": now, "epoch": unit.epoch + stops, "reason": reason}
    return replace(unit, **(anew | changes))


def fall(unit: Unit, limits: Limits, now: float, reason: str) -> Unit:
    """OFF, for longer each time unless the unit had been ON for long."""
    delay_s = next_delay(unit, now)
    until = now + delay_s * _jitter(limits.name, now)
    return enter(unit, "off", now, reason, until=until, delay_s=delay_s, incidents=())


def next_delay(unit: Unit, now: float) -> float:
    """Seconds that the unit stays off if it falls now, before the jitter."""
    settled = -math.inf if unit.settled is None else unit.settled
    steady = unit.state in SERVING and now - settled >= max(STEADY_S, unit.delay_s)
    if unit.delay_s == 0.0 or steady:
        return FIRST_DELAY_S
    return min(2 * unit.delay_s, LONGEST_DELAY_S)


def _jitter(name: str, since: float) -> float:
    digest = blake2b(f"{name} {since!r}".encode(), digest_size=8).digest()
    return 1.0 + JITTER * (2.0 * int.from_bytes(digest, "big") / 2**64 - 1.0)


def to_json(value: Unit | Facts | Limits) -> dict[str, Any]:
    """Only what differs from the defaults, so that a record is short, and without nan."""
    tree, default = asdict(value), type(value)()
    return {name: each for name, each in tree.items() if each == each and each != getattr(default, name)}


def unit_from(tree: dict[str, Any]) -> Unit:
    """From `to_json`. Raises TypeError for a field that there is not."""
    widths = tuple((int(width), float(s), float(at)) for width, s, at in tree.get("widths", ()))
    return Unit(**{**tree, "incidents": tuple(tree.get("incidents", ())), "widths": widths})
