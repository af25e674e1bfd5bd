"""Made-up overviews of a cluster, for whoever shows them; the shape is that of routing/control.py."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

NOW = 1_790_000_000.0
STATES = ("on", "on", "on", "contract", "ramp", "probe", "off", "warmup", "shadow", "emergency", "pinned_off")
REASONS = {
    "on": "S was above 1.05 with 3 standard errors for two ticks",
    "contract": "the upper bound of S was below 1 for three ticks",
    "ramp": "the probe passed: the lower bound of S is 1.21",
    "probe": "30 s have passed since it was turned off",
    "off": "alpha 0.12 is under 0.20",
    "warmup": "a model drafter warms up for 1,800 s",
    "shadow": "version 2 runs in the shadow of version 1",
    "emergency": "the fallback rate 11.2 % is above 10 %",
    "pinned_off": "an operator pinned it off",
}


def peaks(low: int, high: int) -> list[int]:
    """A histogram of 25 bins with peaks at alpha 0.1 and 0.62, of such heights."""
    bump = lambda i, at, most: most * math.exp(-(((i + 0.5) / 25 - at) ** 2) / 0.004)  # noqa: E731
    return [round(bump(i, 0.1, low) + bump(i, 0.62, high)) for i in range(25)]


def tenant(name: str, state: str = "on", bimodal: bool = True, seed: int = 0) -> dict[str, Any]:
    draw = random.Random(seed)
    speedup = {"off": 0.82, "pinned_off": None, "contract": 0.94, "emergency": 0.9}.get(
        state, 1.3 + draw.random()
    )
    bounds = (None, None) if speedup is None else (speedup - 0.11, speedup + 0.09)
    measured = {"S": speedup, "S_low": bounds[0], "S_high": bounds[1], "alpha": 0.3 + 0.5 * draw.random()}
    measured |= {"tau": 1.5 + 2 * draw.random(), "FR": 0.12 * draw.random() if speedup else None}
    stand = {"state": state, "since": NOW - 20 - 900 * draw.random(), "reason": REASONS[state]}
    key = measured | stand
    key |= {
        "drafter": "chat-v1",
        "method": "eagle3",
        "version": "1",
        "until": NOW + 25,
        "gamma": 5,
        "width": 2,
    }
    key |= {"share": 1.0, "TWE": 0.62, "node_yield": 0.41, "bimodal": bimodal}
    key |= {"histogram": peaks(180 if bimodal else 0, 260), "peaks": [0.1, 0.62] if bimodal else [0.62]}
    key |= {"quantiles": {"p5": 0.06, "p50": 0.55, "p95": 0.71, "p99": 0.76}}
    other = key | {
        "drafter": "lookup",
        "method": "ngram",
        "version": None,
        "gamma": 3,
        "width": 1,
        "share": 0.1,
    }
    other |= {"histogram": peaks(30, 9), "peaks": [0.1], "bimodal": False, "until": None}
    classes = [
        {"class": "default", "state": state, "drafter": "chat-v1", "keys": [key]},
        {"class": "long", "state": state, "drafter": "lookup", "keys": [other]},
    ]
    latencies = {"p50": 18.2, "p95": 31.7, "p99": 48.9}
    return {
        "tenant": name,
        "region": "eu-west",
        **stand,
        **measured,
        "SE": 1.31,
        "KRR": 0.83,
        "requests_per_s": 40 * draw.random(),
        "tokens_per_s": 5200 * draw.random(),
        "tpot_ms": latencies,
        "ttft_ms": {"p50": 120, "p95": 410, "p99": 902},
        "causes": {"low_acceptance": 12, "worker_lost": 1, "timeout": 0, "oom": 0, "kv": 3},
        "classes": classes,
    }


def decision(name: str, old: str, new: str, ago: float, drafter: str | None = "chat-v1") -> dict[str, Any]:
    return {
        "time": NOW - ago,
        "key": [name, "default" if drafter else None, drafter],
        "level": "key" if drafter else "tenant",
        "old": {"state": old, "gamma": 5},
        "new": {"state": new},
        "numbers": {"alpha": 0.1234567, "tested": 412, "S_low": 0.71},
        "rule": "low_acceptance",
        "reason": REASONS[new],
    }


def heatmap(name: str, flagged: bool, seed: int = 0) -> dict[str, Any]:
    draw, prompts, alphas = random.Random(seed), [2**i for i in range(18)], [i / 25 for i in range(26)]
    counts = [[0] * 25 for _ in prompts[1:]]
    for _ in range(900):
        length = draw.randrange(4, 13)
        level = draw.gauss(28 - 2.2 * length if flagged else 14, 2.5)
        counts[length][min(24, max(0, round(level)))] += 1
    over = {"tenant": name, "class": "long", "prompt_tokens_over": 4096}
    return {
        "tenant": name,
        "prompt_edges": prompts,
        "alpha_edges": alphas,
        "counts": counts,
        "r": -0.81 if flagged else -0.12,
        "flagged": flagged,
        "suggestion": over if flagged else None,
    }


def slow(name: str, number: int) -> dict[str, Any]:
    return {
        "request_id": f"chatcmpl-{number:032x}",
        "tenant": name,
        "class": "default",
        "drafter": "chat-v1",
        "state": "on",
        "ttft_ms": 812.0 + number,
        "tpot_ms": 96.0 - number,
        "prompt_tokens": 3100 + number,
        "output_tokens": 256,
        "alpha": 0.11,
        "fallback": "low_acceptance" if number % 2 else None,
        "diagnosis": "its drafts were hardly ever accepted, and the batch was full: plain is as fast",
    }


def throughput(ticks: int = 120) -> list[dict[str, Any]]:
    wave = lambda i: math.sin(i / 9) + 0.4 * math.sin(i / 2.3)  # noqa: E731
    return [
        {
            "time": NOW - 5 * (ticks - 1 - i),
            "tokens_per_s": 8400 + 1300 * wave(i),
            "requests_per_s": 41 + 6 * wave(i),
            "tpot_p99_ms": None if 30 < i < 36 else 42 - 7 * wave(i),
        }
        for i in range(ticks)
    ]


def placement() -> dict[str, Any]:
    islands = [[["a100-0", 0], ["a100-0", 1], ["a100-0", 2], ["a100-0", 3]], [["edge-1", 0]], [["edge-1", 1]]]
    seats = [
        ("a100-0", 0, "target 0", None),
        ("a100-0", 1, "target 0", None),
        ("a100-0", 2, "draft small", "chat"),
        ("a100-0", 2, "draft small", "code"),
        ("edge-1", 0, "target 1", None),
        ("edge-1", 0, "draft small", "chat"),
        ("edge-1", None, "draft tiny", "code"),
    ]
    return {
        "islands": islands,
        "seats": [dict(zip(("node", "gpu", "what", "tenant"), seat, strict=True)) for seat in seats],
    }


def replicas() -> list[dict[str, Any]]:
    links = [{"tenant": "chat", "drafter": "small", "workers": 2, "resting": 1}]
    return [
        {
            "source": f"target-{i}",
            "running": 31 - i,
            "waiting": 4 * i,
            "kv_used_blocks": 5200 + 2000 * i,
            "kv_total_blocks": 8192,
            "node": node,
            "gpus": gpus,
            "links": links if i == 0 else [],
        }
        for i, (node, gpus) in enumerate([("a100-0", [0, 1]), ("edge-1", [0])])
    ]


def empty() -> dict[str, Any]:
    """Of a cluster that nobody has asked anything."""
    return {
        "time": NOW,
        "version": 0,
        "speculation": True,
        "interval_s": 5.0,
        "controller": {"state": "ok", "age_s": 1.0},
        "tenants": [],
        "decisions": [],
        "throughput": [],
        "heatmap": [],
        "slowest": [],
        "phases": {},
        "memory": {},
        "replicas": [],
        "placement": {"islands": [], "seats": []},
    }


def busy(
    names: list[str] | None = None, state: Callable[[int], str] = lambda i: STATES[i % 11]
) -> dict[str, Any]:
    """Of a cluster with these tenants, each in another state."""
    names = names or ["chat", "code", "summaries", "search", "translate", "default"]
    phases = {
        "draft_s": 0.41,
        "verify_s": 3.2,
        "schedule_s": 0.12,
        "commit_s": 0.2,
        "draft_per_token_over_AR": 0.34,
    }
    return empty() | {
        "version": 1043,
        "controller": {"state": "ok", "age_s": 2.3},
        "tenants": [tenant(name, state(i), i % 3 != 1, i) for i, name in enumerate(names)],
        "decisions": [
            decision(names[0], "on", "off", 12),
            decision(names[-1], "probe", "ramp", 77),
            decision(names[0], "on", "emergency", 340, None),
            decision(names[-1], "off", "probe", 2000),
        ],
        "throughput": throughput(),
        "heatmap": [heatmap(names[-1], False, 1), heatmap(names[0], True, 2)],
        "slowest": [slow(names[i % len(names)], i) for i in range(10)],
        "phases": phases,
        "memory": {"target_kv_used": 12400, "target_kv_total": 16384},
        "replicas": replicas(),
        "placement": placement(),
    }
