"""vLLM's names, behind a switch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.reports import ENDED, counts, step
from support.scraped import value

from gammaray.config import Config, parse
from gammaray.telemetry import vllm
from gammaray.telemetry.replica import ReplicaTelemetry

LABELS = {"model_name": "m", "engine": "0", "service_instance_id": "target-0"}


def config(**telemetry: object) -> Config:
    return parse({"target": {"model": "m"}, "telemetry": telemetry}, "test")


@pytest.fixture
def text() -> bytes:
    replica = ReplicaTelemetry(config(vllm_names=True), "target-0", None)
    replica.record(
        step(counts(), counts(("code", "default", "lookup")), finished=(ENDED, replace(ENDED, index=1)))
    )
    return replica.meters.text()


def test_counts_of_all_keys(text: bytes) -> None:
    told = {
        vllm.DRAFTS: 40,
        vllm.DRAFTED: 160,
        vllm.ACCEPTED: 60,
        vllm.PROMPT: 100,
        vllm.GENERATED: 102,
        vllm.PREEMPTED: 1,
        vllm.SEEN: 80,
        vllm.REUSED: 60,
        vllm.RUNNING: 3,
        vllm.WAITING: 2,
        vllm.KV_USED: 0.3,
    }
    assert told.keys() == {*vllm.COUNTERS, *vllm.GAUGES}
    assert {name: value(text, name, **LABELS) for name in told} == told


def test_accepted_by_position_adds_up(text: bytes) -> None:
    by_position = [value(text, vllm.PER_POSITION, position=str(i)) for i in range(3)]
    assert by_position == [28, 18, 14]
    assert sum(by_position) == value(text, vllm.ACCEPTED)
    assert value(text, "vllm:request_success_total", finished_reason="stop") == 2


def test_they_are_off_by_default() -> None:
    replica = ReplicaTelemetry(config(), "target-0", None)
    replica.record(step(counts()))
    assert b"vllm:" not in replica.meters.text() and b"gammaray_spec_rounds_total" in replica.meters.text()
