"""A request's plan is the tenant's, narrowed by the request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.config import Speculation, Tenant, parse
from gammaray.errors import InvalidRequest
from gammaray.routing.plan import TenantPlanner, plan
from gammaray.types import PLAIN, SpeculationPlan

TENANT = Tenant(drafter="a", speculation=Speculation(gamma=4, tree_width=2, verification="rejection"))
DRAFTERS = {"a": 1, "b": 2}


def test_without_a_wish_the_tenant_decides() -> None:
    assert plan(TENANT, DRAFTERS) == (SpeculationPlan("a", 4, 2, "rejection"), ())
    assert plan(Tenant(), DRAFTERS) == (PLAIN, ())


def test_a_wish_narrows() -> None:
    assert plan(TENANT, DRAFTERS, gamma=2, width=1)[0] == SpeculationPlan("a", 2, 1, "rejection")
    assert plan(TENANT, DRAFTERS, drafter="b")[0].drafter == "b"
    assert plan(TENANT, DRAFTERS, enabled=False) == (PLAIN, ())
    assert plan(TENANT, DRAFTERS, gamma=0) == (PLAIN, ())
    assert plan(Tenant(), DRAFTERS, drafter="b")[0].drafter == "b"


def test_what_is_cut_is_said() -> None:
    made, notes = plan(TENANT, DRAFTERS, gamma=9, width=3)
    assert (made.gamma, made.width) == (4, 2)
    assert notes == (
        "gamma 9 was cut to 4, the limit of this tenant",
        "width 3 was cut to 2, the limit of this tenant",
    )
    off = Tenant(drafter="a", speculation=Speculation(enabled=False))
    assert plan(off, DRAFTERS, enabled=True) == (PLAIN, ("speculation is off for this tenant",))
    assert plan(off, DRAFTERS) == (PLAIN, ())
    assert plan(Tenant(), DRAFTERS, enabled=True) == (PLAIN, ("no drafter is set for this tenant",))


@pytest.mark.parametrize("tenant", [TENANT, Tenant(speculation=Speculation(enabled=False))])
def test_unknown_drafter(tenant: Tenant) -> None:
    with pytest.raises(InvalidRequest, match="'c'; available: a, b") as fault:
        plan(tenant, DRAFTERS, drafter="c")
    assert fault.value.param == "speculation.drafter"


@given(
    st.fixed_dictionaries(
        {
            "enabled": st.none() | st.booleans(),
            "drafter": st.sampled_from([None, "a", "b"]),
            "gamma": st.none() | st.integers(0, 99),
            "width": st.none() | st.integers(1, 99),
        }
    )
)
def test_no_wish_leaves_the_policy(wish: dict) -> None:
    made, notes = plan(TENANT, DRAFTERS, **wish)
    assert made.gamma <= 4 and made.width <= 2
    if made.drafter is not None and not notes:
        assert wish["gamma"] in (None, made.gamma) and wish["width"] in (None, made.width)


def test_a_tenant_does_not_reach_the_pool_of_another() -> None:
    config = parse(
        {
            "target": {"model": "tiny"},
            "drafters": {"small": {"method": "model", "model": "tiny"}, "lookup": {"method": "ngram"}},
            "tenants": {"bank": {"drafter": "small"}, "shop": {"drafter": "lookup"}},
        },
        "test",
    )
    planner = TenantPlanner(config, pools={("bank", "small")})
    assert planner("bank")[0].drafter == "small"
    with pytest.raises(InvalidRequest, match="no drafter is named 'small'; available: lookup"):
        planner("shop", drafter="small")
    assert TenantPlanner(config)("shop", drafter="small")[0].drafter == "small"


def test_a_drafter_that_is_here_for_one_tenant_is_here_for_all() -> None:
    config = parse(
        {
            "target": {"model": "tiny"},
            "drafters": {"small": {"method": "model", "model": "tiny"}},
            "tenants": {"bank": {"drafter": "small"}, "shop": {"drafter": "small"}, "other": {}},
        },
        "test",
    )
    planner = TenantPlanner(config, pools={("bank", "small")})
    assert [planner(tenant, drafter="small")[0].drafter for tenant in ("bank", "shop", "other")] == [
        "small"
    ] * 3
