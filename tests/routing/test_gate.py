"""The KL gate and the quality layer."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.finished import finished

from gammaray.routing import gate
from gammaray.routing.audited import KEPT, Audited
from gammaray.routing.gate import ACTIVE_S, EVERY_S, Audit, Gate
from gammaray.routing.quality import TOKENS
from gammaray.types import Finished, Key, KeyPolicy, PolicySnapshot, Quality, SpeculationStats

KEY: Key = ("chat", "default", "head")


def ended(quality: Quality | None = None, key: Key = KEY, tested: int = 100, accepted: int = 60) -> Finished:
    stats = SpeculationStats(rounds=50, emitted=110, tries=(tested,), first_hits=accepted)
    tenant, request_class, drafter = key
    return finished(tenant=tenant, request_class=request_class, drafter=drafter, stats=stats, quality=quality)


VERSIONS = {"head": "1"}


def observed(*found: Quality, audit: Audit | None = None, version: str = "1", now: float = 0.0) -> Audit:
    for each in found:
        audit = gate.observe(audit, version, each, now)
    assert audit is not None
    return audit


def due(audit: Audit | None, now: float, version: str = "1") -> bool:
    return KEY in gate.due([KEY], {} if audit is None else {KEY: audit}, {"head": version}, now)


def test_an_audit_takes_texts_until_it_has_enough_tokens() -> None:
    assert due(None, 0.0)
    audit = observed(Quality(120, 0.01, 8.0), Quality(79, 0.01, 8.0))
    assert due(audit, 0.0) and gate.conclude(audit, 0.05) is None
    found = gate.conclude(observed(Quality(1, 0.01, 8.0), audit=audit), 0.05)
    assert found is not None and (found.outcome, found.tokens) == ("pass", TOKENS)
    assert found.kl == pytest.approx(0.01)


def test_kl_is_weighted_by_tokens_and_compared_with_the_threshold() -> None:
    audit = observed(Quality(100, 0.02, 8.0), Quality(300, 0.06, 8.0))
    within, above = gate.conclude(audit, 0.0501), gate.conclude(audit, 0.0499)
    assert within is not None and above is not None
    assert (within.outcome, above.outcome) == ("pass", "violation")
    assert above.reason == "KL 0.05 over 400 tokens exceeds 0.0499 nats"


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_no_number_violates(kl: float) -> None:
    found = gate.conclude(observed(Quality(200, kl, 8.0)), 1e9)
    assert found is not None and found.outcome == "violation"


def closed(kl: float, now: float) -> Audit:
    audit = observed(Quality(200, kl, 8.0), now=now)
    found = gate.conclude(audit, 0.05)
    assert found is not None
    return gate.close(audit, found, now)


def test_after_an_audit_a_key_rests_for_a_day() -> None:
    audit = closed(0.0, 10.0)
    assert not due(audit, 10.0 + EVERY_S - 1) and due(audit, 10.0 + EVERY_S)
    late = observed(Quality(200, 9.0, 8.0), audit=audit, now=20.0)
    assert late == audit, "a text whose comparison had begun before the end counts for none"


def test_a_key_that_violated_is_due_as_soon_as_it_is_back() -> None:
    assert due(closed(0.1, 10.0), 11.0)


def test_another_version_is_audited_at_once_and_on_its_own() -> None:
    audit = observed(Quality(150, 1.0, 8.0))
    other = observed(Quality(50, 0.0, 8.0), audit=audit, version="2")
    assert other == Audit("2", texts=(Quality(50, 0.0, 8.0),))
    assert due(closed(0.0, 2.0), 3.0, version="2") and not due(closed(0.0, 2.0), 3.0)


def test_few_keys_are_audited_at_once_those_that_never_were_first() -> None:
    now, versions = 2 * EVERY_S, {f"d{i:03}": "1" for i in range(1000)}
    never: list[Key] = [("t", "new", f"d{i:03}") for i in range(1000)]
    old: dict[Key, Audit] = {("t", "old", f"d{i:03}"): Audit("1", float(i)) for i in range(5)}
    plain: Key = ("t", "old", None)
    found = gate.due([plain, *old, *never[:3]], old, versions, now, most=4)
    assert found == {*never[:3], ("t", "old", "d000")}
    assert len(gate.due(never, {}, versions, now)) == gate.AT_ONCE


def test_an_idle_key_and_one_that_is_off_give_their_places_away() -> None:
    keys = Gate()
    keys.see(ended(), VERSIONS, 0.0)
    assert keys.due(PolicySnapshot(), VERSIONS, ACTIVE_S - 1) == {KEY}
    assert keys.due(PolicySnapshot(keys={KEY: KeyPolicy("off")}), VERSIONS, 1.0) == frozenset()
    assert keys.due(PolicySnapshot(), VERSIONS, ACTIVE_S) == frozenset()


def test_audited_texts_have_means_by_key_and_correlations_by_tenant() -> None:
    audited = Audited()
    for accepted, kl in ((20, 0.04), (50, 0.03), (80, 0.01)):
        audited.add(ended(Quality(100, kl, 10.0 - 100 * kl), accepted=accepted))
    long: Key = ("chat", "long", "head")
    audited.add(ended(Quality(300, 0.1, 20.0), key=long, accepted=0))
    audited.add(ended(Quality(300, 0.1, 20.0), key=("code", "default", "head")))
    means = audited.means(KEY)
    assert means["kl"] == pytest.approx(0.08 / 3)
    assert means["perplexity"] == pytest.approx((6.0 * 7.0 * 9.0) ** (1 / 3)), "of the three as one text"
    related = audited.correlations([KEY, long, ("chat", "never", "head")])
    assert related["kl"] == pytest.approx(np.corrcoef([0.2, 0.5, 0.8, 0.0], [0.04, 0.03, 0.01, 0.1])[0, 1])
    assert related["perplexity"] == pytest.approx(
        np.corrcoef([0.2, 0.5, 0.8, 0.0], [6.0, 7.0, 9.0, 20.0])[0, 1]
    )
    assert set(audited.keys()) == {KEY, long, ("code", "default", "head")}
    assert audited.correlations([("code", "default", "head")]) == {"kl": None, "perplexity": None}, (
        "one text does not vary"
    )


def test_the_oldest_audited_texts_are_forgotten() -> None:
    audited = Audited()
    for kl in [1.0] * 5 + [0.25] * KEPT:
        audited.add(ended(Quality(100, kl, 8.0)))
    assert audited.means(KEY)["kl"] == pytest.approx(0.25)


def test_what_tells_nothing_is_no_audited_text() -> None:
    audited = Audited()
    audited.add(ended())
    audited.add(ended(Quality(100, math.nan, 8.0)))
    audited.add(ended(Quality(0, 0.0, 1.0)))
    assert not audited.keys() and audited.means(KEY) == {"kl": None, "perplexity": None}
    audited.add(ended(Quality(100, 0.5, 8.0), tested=0, accepted=0))
    assert audited.means(KEY)["kl"] == 0.5, "without a tested token it still has a KL"
    audited.keep({("chat", "other")})
    assert not audited.keys()
