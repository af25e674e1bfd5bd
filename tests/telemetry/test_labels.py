"""Metrics stay bounded however many tenants there are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from support.reports import ENDED, counts, step
from support.scraped import samples, value

from gammaray.telemetry import names
from gammaray.telemetry.labels import Labels
from gammaray.telemetry.meters import Meters
from gammaray.telemetry.recorder import Recorder

LIMIT = 3


def test_the_first_tenants_keep_their_names_and_the_rest_is_other() -> None:
    labels = Labels(2, {"a": "eu"})
    assert labels.key("a", "code", "small", "on") == ("a", "code", "small", "on", "eu")
    assert labels.key("b", "default", None, "off") == ("b", "default", "none", "off", "")
    assert labels.key("c", "code", "small", "on") == ("other", "other", "other", "on", "other")
    assert labels.key("b", "long", "small", "on") == ("b", "long", "small", "on", "")


def test_a_tenant_named_other_is_no_exception() -> None:
    labels = Labels(1)
    labels.key("a", "default", None, "on")
    assert labels.key("other", "code", "small", "on") == ("other", "other", "other", "on", "other")


def test_ten_thousand_tenants_make_few_series_and_lose_no_count() -> None:
    meters = Meters("target-0")
    recorder = Recorder(meters, Labels(LIMIT), "tiny")
    for i in range(10_000):
        name = f"t{i}"
        key = (name, f"class-of-{name}", f"drafter-of-{name}")
        recorder.record(step(counts(key), finished=(replace(ENDED, tenant=name),)))
    text = meters.text()
    rounds = samples(text, names.ROUNDS.series[0])
    assert {labels["tenant"] for labels, _ in rounds} == {"t0", "t1", "t2", "other"}
    assert sum(count for _, count in rounds) == 200_000
    series = Counter(line.partition("{")[0] for line in text.decode().splitlines() if line[0] != "#")
    assert max(series[name] for m in names.METRICS for name in m.series if "_bucket" not in name) <= 20
    assert value(text, names.TTFT.series[2], tenant="other") == 10_000 - LIMIT
    assert b"t3" not in text


def test_as_many_tenants_as_were_asked_for_are_told_apart() -> None:
    """The SDK would fold what is beyond 2000 points of an instrument."""
    meters = Meters("target-0")
    recorder = Recorder(meters, Labels(2500), "tiny")
    for i in range(2500):
        recorder.record(step(counts((f"t{i}", "default", "lookup"))))
    assert len(samples(meters.text(), names.ROUNDS.series[0], drafter="lookup")) == 2500
