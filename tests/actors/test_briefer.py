"""What an ingress hears, and to whom it tells it in which order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gammaray.actors.briefer import Briefer
from gammaray.config import Tenant
from gammaray.routing.briefing import Briefing
from gammaray.routing.bulletin import Bulletin, Known
from gammaray.routing.predictor import Predictor
from gammaray.types import PolicySnapshot

BANK, SHOP = {"bank": Tenant()}, {"shop": Tenant()}


def bulletin(edition: str, revision: int = 0, **fields: Any) -> Bulletin:
    return Bulletin(edition, PolicySnapshot(), revision, **{"tenants": None, "day_ends": 10.0, **fields})


class Case:
    """A board with one bulletin, a router and a gate, which note what they hear."""

    def __init__(self) -> None:
        self.news: Bulletin | None = bulletin("a.1", tenants=BANK)
        self.asked: list[Known] = []
        self.heard: list[tuple[str, Any]] = []
        self.briefer = Briefer(self, lambda briefing: self.heard.append(("brief", briefing)), self)

    def bulletin(self, known: Known) -> Bulletin | None:
        self.asked.append(known)
        return self.news

    def employ(self, tenants: Mapping[str, Tenant]) -> None:
        self.heard.append(("employ", tenants))

    def charge(self, used: Mapping[str, int], until: float) -> None:
        self.heard.append(("charge", (used, until)))

    @property
    def briefing(self) -> Briefing:
        found: Briefing = [what for who, what in self.heard if who == "brief"][-1]
        return found


@pytest.fixture
def case() -> Case:
    return Case()


def test_a_new_tenant_is_known_to_the_router_before_the_gate_lets_it_in(case: Case) -> None:
    assert case.briefer.round()
    assert [who for who, _ in case.heard] == ["brief", "employ", "charge"]
    assert case.briefing.tenants == BANK


def test_without_news_nothing_is_told(case: Case) -> None:
    case.briefer.round()
    case.heard.clear()
    case.news = None
    assert not case.briefer.round()
    assert case.heard == []


def test_what_is_known_is_not_asked_for_again_and_stays(case: Case) -> None:
    predictor = Predictor(7, 3)
    case.news = bulletin("a.1", 4, tenants=BANK, predictor=predictor)
    case.briefer.round()
    case.news = bulletin("a.2", 4, used_today={"bank": 5})
    case.briefer.round()
    assert case.asked == [Known(), Known("a.1", 4, 7)]
    assert (case.briefing.tenants, case.briefing.predictor) == (BANK, predictor)
    assert [what for who, what in case.heard if who == "employ"] == [BANK]
    assert case.heard[-1] == ("charge", ({"bank": 5}, 10.0))


def test_tenants_change(case: Case) -> None:
    case.briefer.round()
    case.news = bulletin("a.2", 1, tenants=SHOP)
    case.briefer.round()
    assert case.briefing.tenants == SHOP
    assert case.briefing.revision == 1
