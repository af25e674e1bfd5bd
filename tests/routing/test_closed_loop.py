"""The control loop from request to policy and back, in simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from support.loop import Arrivals, Loop

from gammaray.config import Config, parse
from gammaray.engine.breaker import ROUNDS
from gammaray.engine.sim import StepCost
from gammaray.engine.sim_drafter import Ranks

COST = StepCost(((1, 0.010), (513, 0.010 + 512 * 0.00008)))  # 10 ms, and 0.08 ms a token
LEVEL_S = 0.00015
GOOD, BAD = 0.65, 0.12
FALLS_AT, RECOVERS_AT, END = 21.3, 45.0, 150.0
LOAD = (Arrivals("falls", 6.0), Arrivals("steady", 3.0))


def config() -> Config:
    tenant = {"drafter": "lookup", "speculation": {"gamma": 4}}
    return parse(
        {
            "target": {"model": "sim"},
            "drafters": {"lookup": {"method": "ngram"}},
            "tenants": {"falls": tenant, "steady": tenant},
        },
        "test",
    )


def fall(at: float, back: float) -> Ranks:
    """Of one tenant: the acceptance is bad in between."""

    def ranks(salt: bytes, now: float) -> Sequence[float]:
        return (BAD if salt == b"falls" and at <= now < back else GOOD,)

    return ranks


def loop(at: float = FALLS_AT, back: float = RECOVERS_AT, end: float = END, speculates: bool = True) -> Loop:
    return Loop(config(), {"lookup": fall(at, back)}, LOAD, COST, LEVEL_S, end, speculates)


@pytest.fixture(scope="module")
def fallen() -> Loop:
    made = loop()
    made.run(END)
    return made


@pytest.fixture(scope="module")
def plain() -> Loop:
    made = loop(speculates=False, end=RECOVERS_AT)
    made.run(RECOVERS_AT)
    return made


def test_requests_break_to_plain_at_their_16th_round(fallen: Loop) -> None:
    """Of those that began after the fall. The next round, a step later, does not draft for them any more."""
    broken = [
        ended.stats.tries[0]
        for at, ended in fallen.finished
        if ended.fallback == "low_acceptance" and at - ended.total_s > FALLS_AT
    ]
    assert len(broken) > 10
    assert min(broken) == ROUNDS
    # Others had luck in the first 16, or drafts so trimmed that they paid for a while.
    assert sum(rounds == ROUNDS for rounds in broken) > len(broken) / 5
    ends = [at for at, _ in fallen.reports]
    assert max(after - before for before, after in pairwise(ends) if after < RECOVERS_AT) < 0.1


def test_its_speculation_is_off_within_10_s(fallen: Loop) -> None:
    off = next(decision for decision in fallen.decided("falls") if decision.new.state == "off")
    assert (off.rule, off.level) == ("tenant_off", "tenant")
    late = [at for at in fallen.drafting("falls") if FALLS_AT + 10 < at < RECOVERS_AT]
    assert late == []
    assert [at for at in fallen.drafting("falls") if FALLS_AT < at < FALLS_AT + 10] != []


@pytest.mark.parametrize("at", [20.0, 22.1, 24.7])
def test_off_within_10_s_wherever_in_a_tick_it_falls(at: float) -> None:
    made = loop(at, 100.0, at + 12)
    made.run(at + 12)
    assert max(made.drafting("falls")) < at + 10


def test_the_tail_is_that_of_plain_decoding(fallen: Loop, plain: Loop) -> None:
    for since, until in ((FALLS_AT, FALLS_AT + 10), (FALLS_AT + 10, RECOVERS_AT)):
        for tenant in ("falls", "steady"):
            assert fallen.per_token(tenant, since, until) <= 1.15 * plain.per_token(tenant, since, until)


def test_the_other_tenant_is_untouched(fallen: Loop, plain: Loop) -> None:
    assert {decision.rule for decision in fallen.decided("steady")} <= {"adapt"}  # of its depth to the load
    while_fallen = fallen.per_token("steady", FALLS_AT + 10, RECOVERS_AT, 0.5)
    assert while_fallen < 0.75 * plain.per_token("steady", FALLS_AT + 10, RECOVERS_AT, 0.5)
    states = {planned.plan.state for name, planned in fallen.planned.items() if name.startswith("steady")}
    assert states == {"on"}


def test_what_is_emitted_is_what_plain_decoding_emits(fallen: Loop, plain: Loop) -> None:
    done = [name for name, outcome in plain.outcomes.items() if outcome.finish]
    assert len(done) > 100
    assert all(fallen.outcomes[name].ids == plain.outcomes[name].ids for name in done)


def test_recovery_is_probed_and_ramped(fallen: Loop) -> None:
    states = [decision.new.state for decision in fallen.decided("falls") if decision.level == "tenant"]
    came_back = states[states.index("off") :]
    ramp = [name for i, name in enumerate(came_back) if i == 0 or name != came_back[i - 1]]
    assert ramp[-4:] == ["off", "probe", "ramp", "on"]
    shares = [d.new.share for d in fallen.decided("falls") if d.new.state == "ramp"]
    assert shares == [0.1, 0.5, 1.0]
    assert max(fallen.drafting("falls")) > END - 1


def test_a_probe_is_a_small_share_of_chains_of_two(fallen: Loop) -> None:
    probes = [
        p.plan for name, p in fallen.planned.items() if name.startswith("falls") and p.plan.state == "probe"
    ]
    drafting = [plan for plan in probes if plan.drafter]
    assert drafting and {(plan.gamma, plan.width) for plan in drafting} == {(2, 1)}
    assert len(drafting) < 0.4 * len(probes)


def test_every_decision_can_be_made_again(fallen: Loop) -> None:
    from gammaray.routing import audit

    assert audit.replay([audit.record(decision) for decision in fallen.decisions]) == []
