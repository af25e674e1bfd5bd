"""A request's plan: the tenant's policy, held back by the controller's, narrowed by the request."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gammaray.config import Canary, Choice, Class, Speculation, Tenant, When
from gammaray.errors import InvalidRequest
from gammaray.routing.briefing import NO_NEWS, Briefing
from gammaray.routing.buckets import pick
from gammaray.routing.plan import EXPLORED, EXPLORING, plan
from gammaray.routing.sampling import is_among
from gammaray.routing.shape import shape
from gammaray.types import PLAIN, Asked, KeyPolicy, PolicySnapshot, SpeculationPlan, State, Wish

TENANT = Tenant(drafter="a", speculation=Speculation(gamma=4, tree_width=2, verification="rejection"))
DRAFTERS = ("a", "b", "c", "d")
OFF = Tenant(drafter="a", speculation=Speculation(enabled=False))
BUCKETS = [
    {"alpha": (0.7, 1.0), "gamma": 6, "width": 6},
    {"alpha": (0.4, 0.7), "gamma": 3, "width": 2},
    {"alpha": (0.0, 0.4), "gamma": 0},
]
STATES: tuple[State, ...] = (
    "on", "contract", "warmup", "ramp", "probe", "shadow", "emergency", "off", "pinned_off",
)  # fmt: skip
drafting = partial(SpeculationPlan, adaptive=True)
STOPPED = ("emergency", "off", "pinned_off")


def wishing(**wish: Any) -> Asked:
    return Asked("r", "t", wish=Wish(**wish))


def briefed(states: dict[str, KeyPolicy], switched: str | None = None, **news: Any) -> Briefing:
    """The policy of the tenant `t`, class `default`, by drafter."""
    keys = {("t", "default", drafter): policy for drafter, policy in states.items()}
    drafters = {("t", "default"): switched} if switched else {}
    return Briefing(PolicySnapshot(1, keys=keys, drafters=drafters), **news)


def drafts(tenant: Tenant, asked: Asked, briefing: Briefing = NO_NEWS) -> str | None:
    return plan(asked, tenant, DRAFTERS, briefing).plan.drafter


def share_of(tenant: Tenant, briefing: Briefing = NO_NEWS, drafter: str = "a", count: int = 4000) -> float:
    ids = [Asked(f"cmpl-{i}", "t") for i in range(count)]
    return sum(drafts(tenant, asked, briefing) == drafter for asked in ids) / count


@pytest.mark.parametrize(
    ("tenant", "wish", "made"),
    [
        (TENANT, {}, drafting("a", 4, 2, "rejection")),
        (Tenant(), {}, PLAIN),
        (OFF, {}, PLAIN),
        (TENANT, {"gamma": 2, "width": 1}, drafting("a", 2, 1, "rejection")),
        (TENANT, {"drafter": "b"}, drafting("b", 4, 2, "rejection")),
        (Tenant(), {"drafter": "b"}, drafting("b", 4, 1)),
        (TENANT, {"enabled": False}, PLAIN),
        (TENANT, {"gamma": 0}, PLAIN),
        (Tenant(drafter="gone"), {}, PLAIN),
    ],
)
def test_the_tenant_decides_and_a_wish_narrows(tenant: Tenant, wish: dict, made: SpeculationPlan) -> None:
    planned = plan(wishing(**wish), tenant, DRAFTERS)
    assert (planned.plan, planned.notes) == (made, ())


def test_the_rest_of_the_plan_is_the_tenants() -> None:
    fixed = Tenant(drafter="a", speculation=Speculation(adaptive=False))
    assert plan(wishing(), fixed, DRAFTERS).plan.adaptive is False
    seeded = Asked("r", "t", seeded=True)
    assert plan(seeded, TENANT, DRAFTERS).plan.verification == "coupled"


@pytest.mark.parametrize(
    ("tenant", "wish", "notes"),
    [
        (
            TENANT,
            {"gamma": 9, "width": 3},
            (
                "gamma 9 was cut to 4, the limit of this tenant",
                "width 3 was cut to 2, the limit of this tenant",
            ),
        ),
        (OFF, {"enabled": True}, ("speculation is off for this tenant",)),
        (OFF, {"gamma": 2}, ("speculation is off for this tenant",)),
        (Tenant(), {"enabled": True}, ("no drafter is set for this tenant",)),
        (
            Tenant(drafter="a", speculation=Speculation(enabled_ratio=0)),
            {"enabled": True},
            ("this request is not in the share of its tenant's that speculates",),
        ),
        (OFF, {"enabled": False}, ()),
        (OFF, {"gamma": 0}, ()),
        (TENANT, {"enabled": False, "drafter": "b", "gamma": 9}, ()),
    ],
)
def test_what_is_cut_is_said_to_whom_asked_for_it(tenant: Tenant, wish: dict, notes: tuple[str, ...]) -> None:
    assert plan(wishing(**wish), tenant, DRAFTERS).notes == notes


@pytest.mark.parametrize("tenant", [TENANT, OFF])
def test_unknown_drafter(tenant: Tenant) -> None:
    with pytest.raises(InvalidRequest, match="'x'; available: a, b") as fault:
        plan(wishing(drafter="x"), tenant, ("b", "a"))
    assert fault.value.param == "speculation.drafter"


def test_drafters_by_rank() -> None:
    """Each line takes away the one that decided before."""
    classes = [Class(name="k", when=When(route="completions"), drafter="c")]
    whole = Tenant(drafter="a", choices=[Choice(drafter="b")], classes=classes)
    switched = Briefing(PolicySnapshot(drafters={("t", "k"): "d", ("t", "default"): "a", ("u", "k"): "a"}))
    assert drafts(whole, wishing(drafter="b"), switched) == "b"
    assert drafts(whole, wishing(), switched) == "d"
    assert drafts(whole, wishing()) == "c"
    assert drafts(whole.model_copy(update={"classes": []}), wishing()) == "b"
    assert drafts(Tenant(drafter="a"), wishing()) == "a"
    assert plan(wishing(), whole, ("a",), switched).plan.drafter == "a"  # the only one in reach


@pytest.mark.parametrize(
    ("length", "load", "drafter"),
    [(4096, 0, "a"), (4097, 0, "b"), (4097, 33, "b"), (100, 33, "c"), (100, 32, "a"), (0, 0, "a")],
)
def test_choices_by_length_and_load(length: int, load: float, drafter: str) -> None:
    choices = [Choice(prompt_tokens_over=4096, drafter="b"), Choice(concurrency_over=32, drafter="c")]
    tenant = Tenant(drafter="a", choices=choices)
    asked = Asked("r", "t", prompt=(7,) * length)
    assert drafts(tenant, asked, Briefing(concurrency=load)) == drafter


@pytest.mark.parametrize("state", STATES)
def test_states(state: State) -> None:
    briefing = briefed({"a": KeyPolicy(state, gamma=3, width=8, share=1.0, epoch=5)})
    made = plan(wishing(), TENANT, DRAFTERS, briefing).plan
    assert (made.state, made.epoch) == (state, 5)
    assert made.drafter == (None if state in STOPPED else "a")
    assert made.shadow == (state == "shadow")
    if made.drafter:
        assert (made.gamma, made.width) == (3, 1 if state in ("contract", "probe") else 2)
        assert made.verification == ("coupled" if state == "shadow" else "rejection")


@pytest.mark.parametrize(
    ("policy", "note"),
    [
        (KeyPolicy("off"), "drafter 'a' is off at present"),
        (KeyPolicy("ramp", share=0.0), "drafter 'a' is on trial"),
        (KeyPolicy("shadow"), "drafter 'a' is on trial: the text is decoded plainly"),
        (KeyPolicy(gamma=0), "too few drafts would be accepted for requests like this one"),
    ],
)
def test_who_asks_for_speculation_learns_that_the_controller_holds_it_back(
    policy: KeyPolicy, note: str
) -> None:
    briefing = briefed({"a": policy})
    assert plan(wishing(enabled=True), TENANT, DRAFTERS, briefing).notes == (note,)
    assert plan(wishing(), TENANT, DRAFTERS, briefing).notes == ()


def test_a_wish_that_the_controller_cuts() -> None:
    planned = plan(wishing(gamma=4), TENANT, DRAFTERS, briefed({"a": KeyPolicy("contract", gamma=2)}))
    assert planned.plan.gamma == 2
    assert planned.notes == ("gamma 4 was cut to 2, the limit of this tenant at the moment",)


def test_the_kill_switch() -> None:
    briefing = Briefing(PolicySnapshot(speculation=False))
    planned = plan(wishing(drafter="b"), TENANT, DRAFTERS, briefing)
    assert planned.plan == SpeculationPlan(state="pinned_off")
    assert planned.notes == ("speculation is off on this server at present",)


def test_another_drafter_of_the_class_goes_on_when_one_is_off() -> None:
    briefing = briefed({"a": KeyPolicy("off", epoch=1)}, switched="b")
    assert plan(wishing(), TENANT, DRAFTERS, briefing).plan == drafting("b", 4, 2, "rejection")
    assert drafts(TENANT, wishing(drafter="a"), briefing) is None


@pytest.mark.parametrize("state", ["probe", "ramp"])
def test_a_configured_drafter_finds_its_way_back_beside_the_one_in_use(state: State) -> None:
    briefing = briefed({"a": KeyPolicy(state, share=1.0)}, switched="b")
    assert drafts(TENANT, Asked("r", "t"), briefing) == "a"
    assert drafts(TENANT, Asked("r", "t"), briefed({"a": KeyPolicy("off")}, switched="b")) == "b"


def test_of_a_key_in_probe_one_request_is_open_and_some_more() -> None:
    briefing = briefed({"a": KeyPolicy("probe", gamma=2, share=0.02)})
    probed = {("t", "default", "a")}
    ids = [Asked(f"cmpl-{i}", "t") for i in range(4000)]
    first = [plan(asked, TENANT, DRAFTERS, briefing).plan for asked in ids[:100]]
    later = [plan(asked, TENANT, DRAFTERS, briefing, probed).plan for asked in ids]
    assert all(made.drafter == "a" for made in first)
    assert 0.01 < sum(made.drafter == "a" for made in later) / len(later) < 0.03
    assert all(made.state == "probe" for made in later)


class TestCanary:
    TENANT = Tenant(drafter="a", speculation=Speculation(canary=Canary(drafter="b", share=0.2)))

    def planned(self, states: dict[str, KeyPolicy], switched: str | None = None) -> list[SpeculationPlan]:
        briefing = briefed(states, switched)
        return [plan(Asked(f"cmpl-{i}", "t"), self.TENANT, DRAFTERS, briefing).plan for i in range(4000)]

    @pytest.mark.parametrize(
        ("policy", "share", "shadow"),
        [
            (None, 0.2, True),  # the controller has not judged it, or is away
            (KeyPolicy("shadow", share=0.2), 0.2, True),
            (KeyPolicy("shadow", share=0.1), 0.1, True),
            (KeyPolicy("warmup", share=0.2), 0.2, False),
            (KeyPolicy("ramp", share=0.5), 0.1, False),
            (KeyPolicy("on"), 0.2, False),
            (KeyPolicy("off"), 0.0, False),
        ],
    )
    def test_shares(self, policy: KeyPolicy | None, share: float, shadow: bool) -> None:
        plans = self.planned({"b": policy} if policy else {})
        trials = [made for made in plans if made.drafter == "b"]
        assert abs(len(trials) / len(plans) - share) < 0.03
        assert all(made.shadow == shadow for made in trials)
        assert all(made == drafting("a", 4, 1) for made in plans if made.drafter != "b")

    def test_one_that_was_accepted_serves_all(self) -> None:
        assert set(self.planned({}, switched="b")) == {drafting("b", 4, 1)}

    def test_who_names_it_does_not_get_it_before_its_time(self) -> None:
        made = [
            plan(Asked(f"cmpl-{i}", "t", wish=Wish(drafter="b")), self.TENANT, DRAFTERS).plan
            for i in range(1000)
        ]
        assert {(one.drafter, one.shadow) for one in made} == {("b", True), (None, False)}


@pytest.mark.parametrize("alpha", [None, 0.0, 0.39, 0.4, 0.69, 0.7, 1.0])
def test_the_bucket_of_the_prior(alpha: float | None) -> None:
    tenant = Tenant.model_validate({"drafter": "a", "buckets": BUCKETS})
    priors = {} if alpha is None else {("t", "default", "a"): alpha}
    planned = plan(wishing(), tenant, DRAFTERS, Briefing(priors=priors))
    expected = (4, 1) if alpha is None else (6, 6) if alpha >= 0.7 else (3, 2) if alpha >= 0.4 else (0, 1)
    assert (planned.plan.gamma, planned.plan.width) == expected
    assert (planned.plan.drafter is None) == (expected[0] == 0)
    if planned.plan.drafter:
        assert planned.forecast.alpha == alpha


@pytest.mark.parametrize(("state", "gamma"), [("probe", 2), ("ramp", 0), ("on", 0), ("contract", 0)])
def test_a_low_forecast_keeps_no_key_from_its_trial(state: State, gamma: int) -> None:
    """Nobody drafts for it else, so the forecast would stay as low as it is, and the key where it is."""
    tenant = Tenant.model_validate({"drafter": "a", "buckets": BUCKETS})
    briefing = briefed({"a": KeyPolicy(state, gamma=2)}, priors={("t", "default", "a"): 0.1})
    made = plan(wishing(), tenant, DRAFTERS, briefing).plan
    assert (made.gamma, made.width, made.drafter) == (gamma, 1, "a" if gamma else None)
    assert plan(wishing(gamma=1), tenant, DRAFTERS, briefing).plan.gamma == min(gamma, 1)


def test_a_few_requests_find_out_whether_a_low_forecast_still_holds() -> None:
    tenant = Tenant.model_validate({"drafter": "a", "buckets": BUCKETS})
    briefing = Briefing(priors={("t", "default", "a"): 0.1})
    assert abs(share_of(tenant, briefing) - 0.02) < 0.01
    assert plan(Asked("cmpl-0", "t"), tenant, DRAFTERS, briefing) == plan(
        Asked("cmpl-0", "t"), tenant, DRAFTERS, briefing
    )


class Oracle:
    version = 7

    def __init__(self, alpha: float | None) -> None:
        self.alpha = alpha
        self.asked: list[tuple[float, ...]] = []

    def predict(self, features: tuple[float, ...]) -> float | None:
        self.asked.append(features)
        return self.alpha


@pytest.mark.parametrize(("alpha", "expected"), [(0.5, 0.5), (None, 0.8)])
def test_the_predictor_comes_before_the_prior(alpha: float | None, expected: float) -> None:
    oracle = Oracle(alpha)
    tenant = Tenant.model_validate({"drafter": "a", "buckets": BUCKETS})
    briefing = Briefing(priors={("t", "default", "a"): 0.8}, predictor=oracle)
    planned = plan(Asked("r", "t", prompt=(1, 2, 3)), tenant, DRAFTERS, briefing)
    assert planned.forecast.alpha == expected
    assert planned.forecast.version == 7
    assert [planned.forecast.features] == oracle.asked
    assert planned.plan.gamma == (3 if alpha else 6)


def test_a_class_has_its_own_terms() -> None:
    one = {"name": "k", "when": {"route": "chat"}, "buckets": BUCKETS[:0], "enabled_ratio": 0.0}
    tenant = Tenant.model_validate({"drafter": "a", "buckets": BUCKETS, "classes": [one]})
    briefing = Briefing(priors={("t", "default", "a"): 0.8, ("t", "k", "a"): 0.8})
    planned = plan(Asked("r", "t", "chat"), tenant, DRAFTERS, briefing)
    assert (planned.request_class, planned.plan) == ("k", PLAIN)
    own = tenant.classes[0].model_copy(update={"enabled_ratio": None})
    tenant = tenant.model_copy(update={"classes": [own]})
    assert plan(Asked("r", "t", "chat"), tenant, DRAFTERS, briefing).plan.gamma == 4
    assert plan(Asked("r", "t"), tenant, DRAFTERS, briefing).plan.gamma == 6


@settings(max_examples=10)
@given(st.floats(0, 1))
def test_shares_converge(ratio: float) -> None:
    tenant = Tenant(drafter="a", speculation=Speculation(enabled_ratio=ratio))
    sigma = (ratio * (1 - ratio) / 1000) ** 0.5
    assert abs(share_of(tenant, count=1000) - ratio) <= 5 * sigma + 1e-3
    assert abs(share_of(TENANT, briefed({"a": KeyPolicy("ramp", share=ratio)}), count=1000) - ratio) <= (
        5 * sigma + 1e-3
    )


def test_shares_are_independent_of_each_other() -> None:
    half = Speculation(enabled_ratio=0.5, canary=Canary(drafter="b", share=0.5))
    briefing = briefed({"a": KeyPolicy("ramp", share=0.5), "b": KeyPolicy("ramp", share=0.5)})
    tenant = Tenant(drafter="a", speculation=half)
    assert abs(share_of(tenant, briefing, "b") - 0.125) < 0.03  # enabled, canary, ramp
    assert abs(share_of(tenant, briefing, "a") - 0.125) < 0.03  # who is in the ramp, but not in the canary


def test_a_larger_share_keeps_who_is_in_a_smaller_one() -> None:
    def inside(share: float) -> set[int]:
        briefing = briefed({"a": KeyPolicy("ramp", share=share)})
        return {i for i in range(1000) if drafts(TENANT, Asked(f"cmpl-{i}", "t"), briefing)}

    assert inside(0.1) < inside(0.5) < inside(1.0) == set(range(1000))


WISHES = st.builds(
    Wish,
    enabled=st.none() | st.booleans(),
    drafter=st.sampled_from([None, "a", "b"]),
    gamma=st.none() | st.integers(0, 99),
    width=st.none() | st.integers(1, 99),
)
POLICIES = st.builds(
    KeyPolicy,
    state=st.sampled_from(STATES),
    gamma=st.integers(0, 16),
    width=st.integers(1, 8),
    share=st.floats(0, 1),
)


@given(WISHES, POLICIES, st.text(max_size=20), st.none() | st.floats(0, 1))
def test_no_wish_exceeds_a_policy(wish: Wish, policy: KeyPolicy, name: str, alpha: float | None) -> None:
    tenant = Tenant.model_validate({"drafter": "a", "buckets": BUCKETS, "speculation": {"tree_width": 2}})
    priors = {} if alpha is None else dict.fromkeys([("t", "default", "a"), ("t", "default", "b")], alpha)
    briefing = briefed({"a": policy, "b": policy}, priors=priors)
    asked = Asked(name, "t", wish=wish)
    planned = plan(asked, tenant, DRAFTERS, briefing)
    made, bucket = planned.plan, pick(tenant.buckets, alpha)
    explored = policy.state in ("probe", "ramp") or is_among(EXPLORED, name, "explore")
    bucket = EXPLORING if bucket and bucket.gamma == 0 and explored else bucket
    most = (bucket.gamma, bucket.width) if bucket else (4, 2)
    assert made.gamma <= min(policy.gamma, most[0])
    assert made.width <= min(policy.width, most[1])
    assert made.drafter is None or not policy.stops
    assert made.shadow == (made.drafter is not None and policy.state == "shadow")
    assert (made.drafter is None) == (made.gamma == 0)
    if made.drafter and not planned.notes:
        assert wish.gamma in (None, made.gamma) and wish.width in (None, made.width)
    assert plan(asked, tenant, DRAFTERS, briefing) == planned


@given(st.lists(st.floats(0.001, 0.999), max_size=6, unique=True), st.floats(0, 1))
def test_buckets_have_no_gap(edges: list[float], alpha: float) -> None:
    ends = [0.0, *sorted(edges), 1.0]
    given = [{"alpha": pair, "gamma": 1} for pair in pairwise(ends)]
    tenant = Tenant.model_validate({"buckets": given})
    found = pick(tenant.buckets, alpha)
    assert found is not None
    assert found.alpha[0] <= alpha <= found.alpha[1]
    assert alpha < found.alpha[1] or alpha == 1
    assert pick(tenant.buckets, None) == (tenant.buckets[0] if len(tenant.buckets) == 1 else None)
    assert pick([], alpha) is None


def test_the_least_of_all_is_the_shape() -> None:
    own = Speculation(gamma=5, tree_width=3)
    made = shape(Wish(gamma=9, width=2), own, None, KeyPolicy(gamma=4, width=8))
    assert (made.gamma, made.width) == (4, 2)
    assert made.notes == ("gamma 9 was cut to 4, the limit of this tenant at the moment",)


def test_what_a_client_wrote_is_not_in_a_repr() -> None:
    asked = Asked(
        "r", "t", "chat", (31337,), "the secret", {"authorization": "key"}, wish=Wish(drafter="mine")
    )
    assert repr(asked) == ("Asked(request_id='r', tenant='t', route='chat', temperature=1.0, seeded=False)")
    planned = repr(plan(Asked("r", "t", "chat", (31337,), "the secret"), TENANT, DRAFTERS))
    assert "31337" not in planned and "secret" not in planned
