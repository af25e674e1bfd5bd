"""Every rule and every exit of math.md section 5, one unit at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gammaray.routing.facts import NAMES, Columns
from gammaray.routing.rules import decide
from gammaray.routing.screen import adapting, screen
from gammaray.routing.states import Facts, Level, Limits, Unit, fall, next_delay
from gammaray.routing.units import Units
from gammaray.types import FREE, State

NOW = 10_000.0
TENANT, CLASS, KEY = (Limits(level, "t/c/d", gamma=8, width=4) for level in ("tenant", "class", "key"))
GOOD = Facts(alpha=0.7, s=1.6, s_low=1.5, s_high=1.7, fr=0.01, fr_all=0.01, best=6)
PASSED = Facts(tested=512.0, probe_low=1.3, probe_fr=0.0)


def unit(state: State = "on", **fields: Any) -> Unit:
    return Unit(**{"state": state, "since": 9_000.0, **fields})


CASES: list[tuple[str, Limits, Unit, Facts, str, State]] = [
    # rule 1
    ("violation", KEY, unit(), Facts(action="violation"), "integrity", "off"),
    # rule 2
    ("third loss", KEY, unit(incidents=(NOW - 200, NOW - 100)), Facts(workers=1, incidents=1),
     "availability", "off"),
    ("three at once", KEY, unit(), Facts(workers=1, incidents=3), "availability", "off"),
    ("losses long ago", KEY, unit(incidents=(NOW - 400, NOW - 301)), Facts(workers=1, incidents=1), "", "on"),
    ("two losses", KEY, unit(), Facts(workers=1, incidents=2), "", "on"),
    ("nobody for 30 s", KEY, unit(unhealthy=NOW - 30), Facts(workers=0), "availability", "off"),
    ("nobody for 29 s", KEY, unit(unhealthy=NOW - 29), Facts(workers=0), "", "on"),
    ("nobody, in the shadow", KEY, unit("shadow", unhealthy=NOW - 30), Facts(workers=0, candidate=True),
     "availability", "off"),
    ("nobody, warming up", KEY, unit("warmup", until=NOW + 9, unhealthy=NOW - 30), Facts(workers=0),
     "availability", "off"),
    # rule 3
    ("FR 16 %", TENANT, unit(), replace(GOOD, fr_all=0.16), "tenant_off", "off"),
    ("FR 15 %", TENANT, unit(), replace(GOOD, fr_all=0.15), "", "on"),
    ("FR 16 % in its ramp", TENANT, unit("ramp", until=NOW + 9), replace(GOOD, fr_all=0.16), "tenant_off",
     "off"),
    ("own limit of FR", replace(TENANT, fr_off=0.08), unit(), replace(GOOD, fr_all=0.09), "tenant_off",
     "off"),
    # rule 4
    ("alpha 0.19", CLASS, unit(), Facts(alpha=0.19, s_low=0.9), "low_acceptance", "off"),
    ("alpha 0.19 that pays", CLASS, unit(), Facts(alpha=0.19, s_low=1.06), "", "on"),
    ("alpha 0.25 once", CLASS, unit(), Facts(alpha=0.25, s_low=0.9), "", "on"),
    ("alpha 0.25 twice", CLASS, unit(low=1), Facts(alpha=0.25, s_low=0.9), "low_acceptance", "off"),
    ("alpha 0.25 twice, that pays", CLASS, unit(low=1), Facts(alpha=0.25, s_low=1.06), "", "on"),
    ("alpha 0.30 twice", CLASS, unit(low=1), Facts(alpha=0.30, s_low=0.9), "", "on"),
    ("own floor", replace(CLASS, alpha_floor=0.5), unit(low=1), Facts(alpha=0.4, s_low=0.9),
     "low_acceptance", "off"),
    ("another drafter", CLASS, unit(), Facts(alpha=0.1, other="b"), "low_acceptance", "on"),
    ("broken drafter", CLASS, unit(), Facts(broken=True, other="b"), "switch", "on"),
    ("broken drafter, no other", CLASS, unit(), Facts(broken=True), "", "on"),
    ("trial passed", CLASS, unit(), Facts(ready="b"), "promote", "on"),
    # rule 5
    ("FR 11 %", TENANT, unit(), replace(GOOD, fr=0.11, fr_all=0.11), "emergency", "emergency"),
    ("FR 10 %", TENANT, unit(), replace(GOOD, fr=0.10, fr_all=0.10), "", "on"),
    ("FR 11 %, rule 4 first", TENANT, unit(), replace(GOOD, fr=0.11, falling=True), "", "on"),
    ("FR 11 % with keys in their warm-up", TENANT, unit(), replace(GOOD, fr_all=0.11), "", "on"),
    # rule 6
    ("S < 1 thrice", KEY, unit(slow=2), Facts(s_high=0.99), "contract", "contract"),
    ("S < 1 twice", KEY, unit(slow=1), Facts(s_high=0.99), "", "on"),
    ("S < 1, then not", KEY, unit(slow=2), Facts(s_high=1.0), "", "on"),
    ("FR 6 %", KEY, unit(), replace(GOOD, fr=0.06), "contract", "contract"),
    ("FR 5 %", KEY, unit(), replace(GOOD, fr=0.05, best=8), "", "on"),
    ("S < 1 in CONTRACT", CLASS, unit(slow=2), Facts(s_high=0.99, contracted=True), "slow", "off"),
    ("S < 1 not in CONTRACT", CLASS, unit(slow=2), Facts(s_high=0.99), "", "on"),
    ("beside the class's: alpha 0.19", KEY, unit(), Facts(alpha=0.19, aside=True), "aside", "off"),
    ("... that pays", KEY, unit("contract"), Facts(alpha=0.19, s_low=1.06, aside=True), "", "contract"),
    ("... S < 1 in CONTRACT", KEY, unit("contract", slow=2), Facts(s_high=0.99, aside=True), "aside", "off"),
    ("the class's own", KEY, unit(), Facts(alpha=0.19), "", "on"),
    # rule 7
    ("deeper", KEY, unit(gamma=4), GOOD, "adapt", "on"),
    ("S not good enough", KEY, unit(gamma=4), replace(GOOD, s_low=1.05), "", "on"),
    ("FR not good enough", KEY, unit(gamma=4), replace(GOOD, fr=0.03), "", "on"),
    ("not adaptive", replace(KEY, adaptive=False), unit(gamma=4), GOOD, "", "on"),
    # exits
    ("contract is over", KEY, unit("contract", clean=2), GOOD, "exit", "on"),
    ("contract, two clean", KEY, unit("contract", clean=1), GOOD, "", "contract"),
    ("contract, S 1.05", KEY, unit("contract", clean=2), replace(GOOD, s_low=1.05), "", "contract"),
    ("contract, FR 3 %", KEY, unit("contract", clean=2), replace(GOOD, fr=0.03), "", "contract"),
    ("off is over", KEY, unit("off", until=NOW), Facts(), "exit", "probe"),
    ("off is not over", KEY, unit("off", until=NOW + 0.1), Facts(), "", "off"),
    ("off without workers", KEY, unit("off", until=NOW, unhealthy=9_900.0), Facts(workers=0), "", "off"),
    ("off with a worker again", KEY, unit("off", until=NOW, unhealthy=9_900.0), Facts(workers=1), "exit",
     "probe"),
    ("off by rule 1", KEY, unit("off"), GOOD, "", "off"),
    ("off, candidate", KEY, unit("off", until=NOW), Facts(candidate=True), "exit", "shadow"),
    ("emergency is over", TENANT, unit("emergency", until=NOW), Facts(), "exit", "probe"),
    ("emergency is not over", TENANT, unit("emergency", until=NOW + 1), replace(GOOD, fr_all=0.5), "",
     "emergency"),
    ("probe passes", KEY, unit("probe", until=NOW + 9), PASSED, "exit", "ramp"),
    ("probe, 511 tokens", KEY, unit("probe", until=NOW + 9), replace(PASSED, tested=511.0), "", "probe"),
    ("probe, S 1.05", KEY, unit("probe", until=NOW + 9), replace(PASSED, probe_low=1.05), "exit", "off"),
    ("probe, FR 5 %", KEY, unit("probe", until=NOW + 9), replace(PASSED, probe_fr=0.05), "exit", "off"),
    ("probe, 10 min, passes", KEY, unit("probe", until=NOW), replace(PASSED, tested=300.0), "exit", "ramp"),
    ("probe, 10 min, nothing used it", KEY, unit("probe", until=NOW), Facts(), "", "probe"),
    ("ramp, one clean", KEY, unit("ramp", share=0.1, until=NOW + 9), GOOD, "", "ramp"),
    ("ramp goes on", KEY, unit("ramp", share=0.1, clean=1, until=NOW + 9), GOOD, "exit", "ramp"),
    ("ramp is over", KEY, unit("ramp", share=1.0, clean=1, until=NOW + 9), GOOD, "exit", "on"),
    ("ramp, FR 6 %", KEY, unit("ramp", clean=1, until=NOW + 9), replace(GOOD, fr=0.06), "exit", "off"),
    ("ramp, low alpha", KEY, unit("ramp", until=NOW + 9), Facts(alpha=0.1), "exit", "off"),
    ("ramp, S < 1", TENANT, unit("ramp", slow=2, until=NOW + 9), Facts(s_high=0.9), "exit", "off"),
    ("ramp, undecided for 10 min", KEY, unit("ramp", until=NOW), replace(GOOD, s_low=1.0), "exit", "off"),
    ("ramp, 10 min, its first clean tick", KEY, unit("ramp", until=NOW), GOOD, "", "ramp"),
    ("ramp, nothing used it", KEY, unit("ramp", until=NOW), Facts(), "", "ramp"),
    ("ramp, thin traffic", KEY, unit("ramp", share=0.1, until=NOW), replace(PASSED, tested=200.0), "exit",
     "ramp"),
    ("ramp, last stage, thin traffic", KEY, unit("ramp", clean=1, until=NOW), replace(PASSED, tested=200.0),
     "exit", "on"),
    ("ramp, too thin to tell", KEY, unit("ramp", until=NOW), replace(PASSED, tested=199.0), "", "ramp"),
    ("ramp, thin, not over", KEY, unit("ramp", until=NOW + 1), PASSED, "", "ramp"),
    ("ramp, thin, S 1.05", KEY, unit("ramp", until=NOW), replace(PASSED, probe_low=1.05), "exit", "off"),
    ("ramp, thin, FR 5 %", KEY, unit("ramp", until=NOW), replace(PASSED, probe_fr=0.05), "exit", "off"),
    ("off, clock set back", KEY, unit("off", since=NOW + 3600, until=NOW + 3630), Facts(), "exit", "probe"),
    ("warm", KEY, unit("warmup", until=NOW), GOOD, "exit", "on"),
    ("warm, S < 1", KEY, unit("warmup", until=NOW), Facts(s_high=0.9), "exit", "off"),
    ("warm candidate", KEY, unit("warmup", until=NOW), replace(GOOD, candidate=True), "exit", "ramp"),
    ("warming up is logged", KEY, unit("warmup", until=NOW + 9), Facts(alpha=0.1), "warmup", "warmup"),
    ("... once", KEY, unit("warmup", until=NOW + 9, noted=True, low=3), Facts(alpha=0.1), "", "warmup"),
    ("shadow waits", KEY, unit("shadow"), replace(GOOD, candidate=True), "", "shadow"),
    ("no longer a candidate", replace(KEY, warmup_s=60.0), unit("shadow"), GOOD, "exit", "warmup"),
    # orders
    ("pin", TENANT, unit(), Facts(action="pin_off"), "operator", "pinned_off"),
    ("unpin", TENANT, unit("pinned_off"), Facts(action="unpin"), "operator", "probe"),
    ("unpin what is not pinned", TENANT, unit(), Facts(action="unpin"), "", "on"),
    ("release the kill switch", Limits("global"), unit("pinned_off"), Facts(action="unpin"), "operator",
     "on"),
    ("pinned stays", KEY, unit("pinned_off", until=1.0), GOOD, "", "pinned_off"),
    ("reset rule 1", KEY, unit("off"), Facts(action="reset"), "operator", "on"),
    ("accept", replace(KEY, warmup_s=60.0), unit("shadow"), Facts(action="accept", candidate=True),
     "rollout", "warmup"),
    ("accept n-gram", KEY, unit("shadow"), Facts(action="accept", candidate=True), "rollout", "ramp"),
    ("accept twice", KEY, unit("warmup"), Facts(action="accept", candidate=True), "", "warmup"),
    ("reject", KEY, unit("shadow"), Facts(action="reject", candidate=True), "rollout", "off"),
    ("the class left it", KEY, unit(), Facts(action="fall", note="b is tried"), "switch", "off"),
    ("the class tries it", KEY, unit(), Facts(action="probe", note="b is tried"), "switch", "probe"),
    ("the class tries one that is off", KEY, unit("off"), Facts(action="probe"), "", "off"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "before", "facts", "rule", "state"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_one_unit(limits: Limits, before: Unit, facts: Facts, rule: str, state: State) -> None:
    after, fired = decide(before, facts, limits, NOW)
    assert (fired, after.state) == (rule, state)
    if fired:
        assert after.reason
        assert after.decided != before.decided
    else:
        assert after.decided == before.decided


def test_integrity_ends_with_the_operator_alone() -> None:
    """Rule 1 outlives any time and any good number."""
    broken, _ = decide(unit(), Facts(action="violation"), KEY, NOW)
    assert decide(broken, replace(GOOD, workers=2), KEY, NOW + 1e7)[0].state == "off"


def test_the_worker_is_back() -> None:
    healthy, _ = decide(unit(unhealthy=NOW - 29), Facts(workers=1), KEY, NOW)
    assert healthy.unhealthy is None


def test_a_lost_pool_is_probed_as_soon_as_a_worker_is_healthy() -> None:
    lost, _ = decide(unit(unhealthy=NOW - 30), Facts(workers=0), KEY, NOW)
    assert decide(lost, Facts(workers=0), KEY, NOW + 500)[0].state == "off"
    assert decide(lost, Facts(workers=1), KEY, NOW + 5)[0].state == "probe"
    assert lost.delay_s == 0.0


def test_incidents_that_turned_a_key_off_do_not_count_again() -> None:
    fallen, _ = decide(unit(incidents=(NOW - 9, NOW - 5)), Facts(workers=1, incidents=1), KEY, NOW)
    probing, _ = decide(fallen, Facts(workers=1), KEY, NOW + 33)
    assert probing.state == "probe"
    assert decide(probing, Facts(workers=1, incidents=1), KEY, NOW + 40)[0].state == "probe"


@pytest.mark.parametrize("limits", [CLASS, KEY])
def test_a_tick_that_tells_nothing_breaks_no_streak(limits: Limits) -> None:
    before = unit("ramp", low=1, slow=1, clean=1, until=NOW + 9)
    assert decide(before, Facts(), limits, NOW) == (before, "")


def test_what_another_drafter_may_do_for_its_class() -> None:
    after, _ = decide(unit(low=1), Facts(alpha=0.1, other="b"), CLASS, NOW)
    assert (after.drafter, after.low, after.epoch) == ("b", 0, 0)


def test_contracting_drafts_a_chain_of_the_best_depth() -> None:
    after, _ = decide(unit(slow=2), Facts(s_high=0.9, best=3), KEY, NOW)
    assert (after.gamma, after.width) == (3, 1)
    fixed, _ = decide(unit(slow=2), Facts(s_high=0.9, best=3), replace(KEY, adaptive=False), NOW)
    assert (fixed.gamma, fixed.width) == (FREE.gamma, 1)
    assert decide(replace(fixed, clean=2), GOOD, replace(KEY, adaptive=False), NOW)[0].width == FREE.width
    assert decide(replace(after, clean=2), GOOD, KEY, NOW)[0].gamma == 3


def test_depth_moves_by_one_up_to_what_is_configured() -> None:
    key, depths = unit(gamma=4), []
    for tick in range(6):
        key, _ = decide(key, replace(GOOD, best=8), replace(KEY, width=1, gamma=7), NOW + 5 * tick)
        depths.append(key.gamma)
    assert depths == [5, 6, FREE.gamma, FREE.gamma, FREE.gamma, FREE.gamma]  # 7 is no ceiling


def test_depth_beyond_eight_comes_back() -> None:
    key = unit()
    for tick in range(6):
        key, _ = decide(key, replace(GOOD, best=8), replace(KEY, width=1, gamma=12), NOW + 5 * tick)
    assert key.gamma == 8


def test_width_climbs_to_the_better_measured_one() -> None:
    """S is best at width 2; each width holds for five minutes, and no other is tried for an hour."""
    measured = {1: 1.5, 2: 1.9, 3: 1.7, 4: 1.6}
    key, seen = unit(width=4, since=NOW), []
    for tick in range(1, 12 * 30):
        width = min(key.width, 4)
        key, _ = decide(key, replace(GOOD, best=8, s=measured[width]), KEY, NOW + 5 * tick)
        seen.append(min(key.width, 4))
    changes = [i for i in range(1, len(seen)) if seen[i] != seen[i - 1]]
    assert [seen[0], *(seen[i] for i in changes)] == [4, 3, 2, 1, 2]
    assert all(later - earlier == 60 for earlier, later in pairwise(changes))


def test_ramp_stages() -> None:
    key, _ = decide(unit("probe", until=NOW), PASSED, KEY, NOW)
    shares = [key.share]
    for tick in range(1, 7):
        key, _ = decide(key, GOOD, KEY, NOW + 5 * tick)
        shares.append(key.share)
    assert shares == [0.1, 0.1, 0.5, 0.5, 1.0, 1.0, 1.0]
    assert (key.state, key.settled) == ("on", NOW + 30)


def test_delays_double_up_to_half_an_hour() -> None:
    key, delays = unit(), []
    for _ in range(9):
        key = fall(key, KEY, NOW, "")
        delays.append(key.delay_s)
        assert key.until is not None
        assert abs(key.until - NOW - key.delay_s) <= 0.1 * key.delay_s
        key = replace(key, state="probe")
    assert delays == [30, 60, 120, 240, 480, 960, 1800, 1800, 1800]


@pytest.mark.parametrize(
    ("delay_s", "on_for", "expected"), [(240, 1799, 480), (240, 1800, 30), (30, 10, 60), (0, 10, 30)]
)
def test_a_delay_starts_anew_after_half_an_hour(delay_s: float, on_for: float, expected: float) -> None:
    key = unit(delay_s=delay_s, settled=NOW - on_for)
    assert next_delay(key, NOW) == expected


def test_jitter_depends_on_the_unit_alone() -> None:
    """Units that fall at the same tick are not probed at the same one; the same unit is, in each replay."""
    ends = [fall(unit(), replace(KEY, name=f"t/{i}"), NOW, "").until or 0.0 for i in range(200)]
    assert ends == [fall(unit(), replace(KEY, name=f"t/{i}"), NOW, "").until for i in range(200)]
    assert min(ends) < NOW + 28 < NOW + 32 < max(ends)
    assert all(NOW + 27 <= end <= NOW + 33 for end in ends)


@pytest.mark.parametrize(("candidate", "warmup_s", "states"), [
    (False, 1800.0, ["warmup"]), (False, 0.0, ["on"]), (True, 1800.0, ["shadow", "warmup"]), (True, 0.0,
     ["shadow", "ramp"]),
])  # fmt: skip
def test_first_states(candidate: bool, warmup_s: float, states: list[State]) -> None:
    limits = replace(KEY, warmup_s=warmup_s, trial_share=0.05)
    key, _ = decide(unit("off"), Facts(action="reset", candidate=candidate), limits, NOW)
    seen = [key.state]
    if candidate:
        assert key.share == 0.05
        key, _ = decide(key, Facts(action="accept", candidate=True), limits, NOW)
        seen.append(key.state)
    assert seen == states
    if key.state == "warmup":
        assert key.until == NOW + 1800


def test_an_epoch_begins_with_each_stop() -> None:
    key = unit()
    for action, epoch in (
        ("pin_off", 1),
        ("unpin", 1),
        ("fall", 2),
        ("pin_off", 2),
        ("unpin", 2),
        ("reset", 3),
    ):
        key, _ = decide(key, Facts(action=action), KEY, NOW)  # type: ignore[arg-type]
        assert key.epoch == epoch, action


NUMBERS = st.sampled_from(
    [float("nan"), 0.0, 0.02, 0.03, 0.04, 0.051, 0.11, 0.16, 0.19, 0.25, 0.5, 0.95, 1.0, 1.04, 1.06, 2.0]
)
TIMES = st.sampled_from([None, NOW - 700, NOW - 5, NOW, NOW + 5])
LEVELS: tuple[Level, ...] = ("tenant", "class", "key")
UNITS = st.builds(
    Unit, state=st.sampled_from(get_args(State)), since=st.sampled_from([0.0, NOW - 300, NOW - 5, NOW + 9]),
     until=TIMES,
    share=st.sampled_from([0.02, 0.1, 0.5, 1.0]), gamma=st.sampled_from([1, 3, 5, 16]),
     width=st.sampled_from([1, 2, 8]),
    low=st.integers(0, 3), slow=st.integers(0, 2), clean=st.integers(0, 1), noted=st.booleans(),
)  # fmt: skip


@settings(max_examples=1500, deadline=None)
@given(
    st.sampled_from(LEVELS), UNITS, st.lists(NUMBERS, min_size=9, max_size=9), st.integers(0, 8),
    st.booleans(), st.booleans(), st.integers(0, 2), st.booleans(), st.booleans(),
)  # fmt: skip
def test_screening_misses_no_unit(
    level: Level,
    before: Unit,
    numbers: list[float],
    best: int,
    adaptive: bool,
    contracted: bool,
    eager: int,
    candidate: bool,
    aside: bool,
) -> None:
    """Whom `screen` leaves out, `decide` would have left as it is."""
    values: dict[str, Any] = dict(zip([name for name in NAMES if name != "best"], numbers, strict=True))
    values |= {"best": best, "tested": 0.0 if numbers[6] != numbers[6] else 512 * numbers[6]}
    about: dict[str, Any] = {
        "contracted": contracted and level == "class",
        "candidate": candidate and level == "key",
        "aside": aside and level == "key",
    }
    about |= (
        {"broken": eager == 1, "other": "b", "ready": "b" if eager == 2 else None} if level == "class" else {}
    )
    limits = Limits(level, "t", gamma=5, width=3, adaptive=adaptive)
    units: Units[str] = Units()
    units.add("t", before, limits)
    for name, value in (
        ("contracted", about["contracted"]),
        ("eager", eager > 0),
        ("candidate", about["candidate"]),
        ("aside", about["aside"]),
    ):
        units.flag(0, name, value)
    columns = Columns(**{name: np.array([float(value)]) for name, value in values.items()})
    looked = {
        *screen(level, units, columns, NOW).tolist(),
        *(adapting(units, columns, NOW).tolist() if level == "key" else ()),
    }
    if not looked:
        assert decide(before, Facts(**values, **about), limits, NOW) == (before, "")


PLAIN_STATES = ("off", "emergency", "pinned_off")


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(LEVELS), UNITS, st.booleans())
def test_every_state_has_an_exit(level: Level, before: Unit, candidate: bool) -> None:
    """With good numbers it comes to ON, with bad ones to a plain state; only the operator's pin stays."""
    limits = Limits(level, "t", gamma=8, warmup_s=60.0)
    candidate = candidate and level == "key"
    if before.until is None and before.state in (*PLAIN_STATES, "probe", "ramp", "warmup"):
        before = replace(before, until=NOW)  # only rule 1 and pins have no end
    if before.state == "pinned_off":
        before, _ = decide(before, Facts(action="unpin"), limits, NOW)
    good = replace(GOOD, tested=512.0, probe_low=1.3, probe_fr=0.0, candidate=candidate)
    bad = Facts(alpha=0.1, s=0.8, s_low=0.7, s_high=0.9, fr=0.3, fr_all=0.3, best=1, tested=512.0,
     probe_low=0.8,
                probe_fr=0.3, contracted=level == "class", candidate=candidate)  # fmt: skip
    assert "on" in _visited(before, good, limits)
    seen = _visited(before, bad, limits)
    assert {"off", "emergency", "contract"} & set(seen)


def _visited(unit: Unit, facts: Facts, limits: Limits) -> list[State]:
    """States in 20 minutes of such ticks."""
    seen = [unit.state]
    for tick in range(240):
        unit, _ = decide(unit, facts, limits, NOW + 5 * tick)
        if unit.state == "shadow":
            unit, _ = decide(unit, replace(facts, action="accept"), limits, NOW + 5 * tick)
        seen.append(unit.state)
    return seen
