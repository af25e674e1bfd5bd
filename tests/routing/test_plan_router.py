"""The router of one ingress: what is open, whom it reaches, and news that arrive while it runs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import ClassVar

import pytest

from gammaray.config import Config, Limits, Tenant, parse
from gammaray.errors import InvalidRequest, Unauthorized
from gammaray.routing.briefing import Briefing
from gammaray.routing.plan import Router
from gammaray.types import Asked, KeyPolicy, PolicySnapshot, SpeculationPlan, Wish

DRAFTERS = {"small": {"method": "model", "model": "tiny"}, "lookup": {"method": "ngram"}}


def configured(**tenants: object) -> Config:
    return parse({"target": {"model": "tiny"}, "drafters": DRAFTERS, "tenants": tenants}, "test")


def planned(router: Router, tenant: str, drafter: str | None = None) -> SpeculationPlan:
    with router.open(Asked("r", tenant, wish=Wish(drafter=drafter))) as made:
        return made.plan


def test_a_tenant_does_not_reach_the_pool_of_another() -> None:
    config = configured(bank={"drafter": "small"}, shop={"drafter": "lookup"})
    router = Router(config, pools={("bank", "small")})
    assert planned(router, "bank").drafter == "small"
    assert planned(router, "bank", "lookup").drafter == "lookup"
    with pytest.raises(InvalidRequest, match="no drafter is named 'small'; available: lookup"):
        planned(router, "shop", "small")
    assert planned(Router(config), "shop", "small").drafter == "small"


def test_a_drafter_that_is_here_for_one_tenant_is_here_for_all() -> None:
    config = configured(bank={"drafter": "small"}, shop={"drafter": "small"}, other={})
    router = Router(config, pools={("bank", "small")})
    assert [planned(router, name, "small").drafter for name in ("bank", "shop", "other")] == ["small"] * 3


def test_a_tenant_whose_drafter_only_others_have_decodes_plainly() -> None:
    router = Router(configured(bank={"drafter": "small"}), pools={("bank", "small")})
    router.brief(Briefing(tenants={"bank": Tenant(drafter="small"), "new": Tenant(drafter="small")}))
    assert planned(router, "bank").drafter == "small"
    assert planned(router, "new").drafter is None


def test_news_count_from_the_next_request_on() -> None:
    router = Router(configured(bank={"drafter": "small", "limits": {"max_tokens": 7}}))
    assert router.limits("bank") == Limits(max_tokens=7)
    with router.open(Asked("r", "bank")) as before:
        router.brief(
            Briefing(PolicySnapshot(2, speculation=False), tenants={"bank": Tenant(drafter="lookup")})
        )
        assert before.plan.drafter == "small"
    assert planned(router, "bank") == SpeculationPlan(state="pinned_off")
    assert router.limits("bank") == Limits()
    router.brief(Briefing(tenants={}))
    with pytest.raises(Unauthorized, match="removed"):
        planned(router, "bank")


class TestProbes:
    KEYS: ClassVar = {("bank", "default", name): KeyPolicy("probe", 2, 1, share=0.0) for name in DRAFTERS}

    @pytest.fixture
    def router(self) -> Router:
        config = configured(bank={"drafter": "small"}, shop={"drafter": "small"})
        return Router(config, briefing=Briefing(PolicySnapshot(1, keys=self.KEYS)))

    def test_one_of_a_key_is_open_at_a_time(self, router: Router) -> None:
        with router.open(Asked("r", "bank")) as first:
            assert first.plan == SpeculationPlan("small", 2, 1, adaptive=True, state="probe")
            assert planned(router, "bank") == SpeculationPlan(state="probe")
            assert planned(router, "bank", "lookup").drafter == "lookup"  # another key
            assert planned(router, "shop").state == "on"
            assert planned(router, "bank") == SpeculationPlan(state="probe")  # what ended was no probe
        assert planned(router, "bank").drafter == "small"

    def test_a_failure_ends_it_too(self, router: Router) -> None:
        with pytest.raises(ZeroDivisionError), router.open(Asked("r", "bank")):
            raise ZeroDivisionError
        assert planned(router, "bank").drafter == "small"

    def test_the_last_of_several_ends_it(self, router: Router) -> None:
        wide = {key: KeyPolicy("probe", 2, 1, share=1.0) for key in self.KEYS}
        with ExitStack() as first, ExitStack() as second:
            router.brief(Briefing(PolicySnapshot(2, keys=wide)))
            for stack in (first, second):
                assert stack.enter_context(router.open(Asked("r", "bank"))).plan.drafter == "small"
            router.brief(Briefing(PolicySnapshot(3, keys=self.KEYS)))
            first.close()
            assert planned(router, "bank").drafter is None
            second.close()
            assert planned(router, "bank").drafter == "small"
