"""Step reports and overviews of the controller, made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gammaray.types import (
    Finished,
    Key,
    KeyCounts,
    Quality,
    Reuse,
    SpeculationStats,
    StepReport,
    Traced,
)

from .finished import finished

STATS = SpeculationStats(
    rounds=20,
    drafted=80,
    verified=60,
    accepted=30,
    emitted=50,
    tested=40,
    first_accepted=24,
    lengths=(0, 8, 2, 4, 6),
    level_tested=(20, 12, 8),
    level_first=(12, 8, 4),
    level_accepted=(14, 9, 7),
    ranks=(24, 6),
    first_hits=24,
    tries=(20, 12, 8),
    hits=(14, 9, 7),
)
ENDED = finished(
    reason="stop",
    prompt_tokens=100,
    cached_tokens=64,
    output_tokens=51,
    stats=STATS,
    queued_s=0.25,
    first_s=0.5,
    total_s=3.0,
    quality=Quality(tokens=50, kl=0.004, perplexity=4.0),
    request_id="r1#0",
)
EMPTY = StepReport(
    step=1,
    running=3,
    waiting=2,
    prefill_tokens=64,
    verified_nodes=12,
    kv_used_blocks=30,
    kv_total_blocks=100,
    preempted=1,
    kv_shrunk=2,
    drafter_failures=1,
    draft_s=0.002,
    verify_s=0.01,
    schedule_s=0.0005,
    commit_s=0.0015,
    trimmed_nodes=5,
    target_reuse=Reuse(80, 60),
    draft_reuse=Reuse(40, 10),
)


def counts(key: Key = ("chat", "default", "lookup"), stats: SpeculationStats = STATS) -> KeyCounts:
    return KeyCounts(*key, running=1, stats=stats, base_s=0.2, extra_s=0.1)


def step(
    *parts: KeyCounts, finished: tuple[Finished, ...] = (), traced: tuple[Traced, ...] = ()
) -> StepReport:
    return replace(EMPTY, counts=parts, finished=finished, traced=traced)


def overview(tenants: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """Of the controller, as far as metrics read it."""
    return {
        "time": 1_700_000_000.0,
        "version": 7,
        "speculation": True,
        "interval_s": 5.0,
        "tenants": tenants,
        "phases": {"draft_per_token_over_AR": 0.12},
        "controller": {"state": "ok", "age_s": 2.0},
        "memory": {"target_kv_used": 30, "target_kv_total": 100, "target_krr": 0.75, "draft_krr": None},
        **changes,
    }


def tenant(name: str, *keys: dict[str, Any], **changes: Any) -> dict[str, Any]:
    one = {
        "tenant": name,
        "region": "eu",
        "state": "on",
        "alpha": 0.6,
        "tau": 2.5,
        "S": 1.6,
        "SE": 1.5,
        "FR": 0.02,
    }
    one |= {"requests_per_s": 2.0, "classes": [{"class": "default", "keys": [*keys] or [key()]}]}
    return one | changes


def key(drafter: str | None = "lookup", **changes: Any) -> dict[str, Any]:
    one: dict[str, Any] = {
        "drafter": drafter,
        "state": "on",
        "gamma": 4,
        "width": 2,
        "share": 1.0,
        "alpha": 0.6,
    }
    one |= {"tau": 2.5, "S": 1.6, "S_low": 1.5, "S_high": 1.7, "SE": 1.5, "FR": 0.02, "TWE": 0.5}
    one |= {"node_yield": 0.5, "bimodal": False, "quantiles": {"p5": 0.2, "p50": 0.6, "p95": 0.8, "p99": 0.9}}
    return one | changes
