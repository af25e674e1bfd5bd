"""What a replica counts is exactly what its reports say."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from support.reports import EMPTY, ENDED, STATS, counts, step
from support.scraped import samples, value

from gammaray.telemetry import names
from gammaray.telemetry.labels import Labels
from gammaray.telemetry.meters import Meters
from gammaray.telemetry.recorder import Recorder
from gammaray.telemetry.requests import PENDING
from gammaray.types import KeyPolicy, PolicySnapshot, SpeculationStats

CHAT = ("chat", "default", "lookup")


class Replica:
    def __init__(self, regions: dict[str, str | None] | None = None) -> None:
        self.meters = Meters("target-0")
        self.recorder = Recorder(self.meters, Labels(200, regions), "tiny")

    def value(self, metric: names.Metric, part: int = 0, **labels: str) -> float:
        return value(self.meters.text(), metric.series[part], **labels)


def test_counts_of_each_key_add_up() -> None:
    replica = Replica({"chat": "eu"})
    other = ("code", "long", None)
    replica.recorder.record(step(counts(CHAT), counts(other, SpeculationStats(rounds=1, emitted=1))))
    replica.recorder.record(step(counts(CHAT)))
    told = (20, 80, 60, 30, 50, 40, 24, 30)  # of STATS, in the order of names.SPEC
    labels = {"tenant": "chat", "class": "default", "drafter": "lookup", "state": "on", "region": "eu"}
    for metric, once in zip(names.SPEC, told, strict=True):
        assert replica.value(metric, **labels) == 2 * once, metric.name
    assert replica.value(names.ROUNDS, tenant="code", drafter="none") == 1


def test_rounds_count_for_the_state_of_their_key() -> None:
    replica = Replica()
    replica.recorder.record(step(counts(CHAT)))
    replica.recorder.apply(PolicySnapshot(keys={CHAT: KeyPolicy("shadow")}))
    replica.recorder.record(step(counts(CHAT), counts(CHAT)))
    assert replica.value(names.ROUNDS, state="on") == 20
    assert replica.value(names.ROUNDS, state="shadow") == 40


def test_the_engine_as_a_whole() -> None:
    replica = Replica()
    for _ in range(3):
        replica.recorder.record(EMPTY)
    told = (1, 64, 1, 2, 1, 5)  # in the order of names.ENGINE
    assert [replica.value(metric) for metric in names.ENGINE] == [3 * once for once in told]
    phases = {"draft": 0.002, "verify": 0.01, "schedule": 0.0005, "state": 0.0015}
    for phase, seconds in phases.items():
        assert replica.value(names.PHASE_TIME, phase=phase) == pytest.approx(3 * seconds)
    assert [replica.value(metric, memory="target") for metric in names.REUSE] == [240, 180]
    assert [replica.value(metric, memory="draft") for metric in names.REUSE] == [120, 30]
    assert [replica.value(metric) for metric in names.LOAD] == [3, 2]  # now, not summed
    assert [replica.value(metric, memory="target") for metric in names.KV] == [30, 100]


def test_fallbacks_by_cause_and_their_plans() -> None:
    replica = Replica()
    ends: list[dict[str, Any]] = [{}, {"fallback": "timeout"}, {"fallback": "kv"}, {"fallback": "kv"}]
    ends += [{"shadow": True, "state": "shadow"}, {"drafter": None}]  # neither was to speculate
    replica.recorder.record(step(finished=tuple(replace(ENDED, **end) for end in ends)))
    assert replica.value(names.PLANNED) == 4
    found = {c: replica.value(names.FALLBACKS, cause=c) for c in names.CAUSES}
    assert found == {"low_acceptance": 0, "worker_lost": 0, "timeout": 1, "oom": 0, "kv": 2}
    finished = samples(replica.meters.text(), names.FINISHED.series[0], reason="stop")
    assert sum(count for _, count in finished) == 6


@pytest.mark.parametrize(
    ("metric", "labels", "total"),
    [
        (names.TTFT, {}, 0.5),
        (names.TPOT, {}, 2.5 / 50),
        (names.DURATION, {}, 3.0),
        (names.QUEUED, {}, 0.25),
        (names.TOKENS, {"gen_ai_token_type": "input"}, 100),
        (names.TOKENS, {"gen_ai_token_type": "output"}, 51),
        (names.ALPHA, {}, 0.6),
        (names.TAU, {}, 2.5),
        (names.KL, {}, 0.004),
        (names.PERPLEXITY, {}, 4.0),
    ],
    ids=lambda one: one.name if isinstance(one, names.Metric) else None,
)
def test_histograms_are_exact(metric: names.Metric, labels: dict[str, str], total: float) -> None:
    replica = Replica()
    replica.recorder.record(step(finished=(ENDED, ENDED, ENDED)))
    assert replica.value(metric, 1, **labels) == pytest.approx(3 * total, rel=1e-12)
    assert replica.value(metric, 2, **labels) == 3
    buckets = samples(replica.meters.text(), metric.series[0], **labels)
    edges = {float(found["le"]): count for found, count in buckets}
    assert edges == {edge: 3.0 * (total <= edge) for edge in (*metric.edges, float("inf"))}


def test_genai_metrics_name_their_model() -> None:
    replica = Replica()
    replica.recorder.record(step(finished=(ENDED,)))
    assert replica.value(names.TTFT, 2, gen_ai_request_model="tiny", gen_ai_provider_name="gammaray") == 1


def test_a_prompt_of_several_sequences_counts_once() -> None:
    replica = Replica()
    replica.recorder.record(step(finished=(ENDED, replace(ENDED, index=1))))
    assert replica.value(names.TOKENS, 1, gen_ai_token_type="input") == 100
    assert replica.value(names.TOKENS, 1, gen_ai_token_type="output") == 102


def test_what_says_nothing_stays_out_of_histograms() -> None:
    """Too few tested tokens, no draft, a single token, none at all."""
    replica = Replica()
    few = replace(ENDED, stats=replace(STATS, tries=(31,), first_hits=31))
    plain = replace(ENDED, stats=SpeculationStats(rounds=9, emitted=9), output_tokens=1, quality=None)
    replica.recorder.record(step(finished=(few, plain, replace(plain, output_tokens=0))))
    text = replica.meters.text()
    assert samples(text, names.ALPHA.series[2]) == []
    assert value(text, names.TAU.series[2]) == 1
    assert value(text, names.TPOT.series[2]) == 1
    assert value(text, names.TTFT.series[2]) == 2
    assert value(text, names.DURATION.series[2]) == 3


def test_while_nobody_collects_few_sequences_wait() -> None:
    replica = Replica()
    for _ in range(PENDING + 50):
        replica.recorder.record(step(finished=(ENDED,)))
    assert len(replica.recorder._requests._pending) == PENDING
    assert replica.value(names.TTFT, 2) == PENDING + 50


def test_none_is_lost_when_another_thread_collects_meanwhile() -> None:
    replica = Replica()
    total = 3 * PENDING
    recording = threading.Thread(
        target=lambda: [replica.recorder.record(step(finished=(ENDED,))) for _ in range(total)]
    )
    recording.start()
    while recording.is_alive():
        replica.meters.text()
    assert replica.value(names.TTFT, 2) == total
    assert replica.value(names.TTFT, 1) == pytest.approx(total * 0.5)


def test_each_process_is_a_label_and_no_request_is() -> None:
    replica = Replica()
    replica.recorder.record(step(counts(CHAT), finished=(ENDED,)))
    text = replica.meters.text().decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines and all('service_instance_id="target-0"' in line for line in lines)
    assert ENDED.request_id not in text
