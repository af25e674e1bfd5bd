"""Drafts that were rejected stay in memory: no sink of a real run has one, whatever fails and whoever crashes."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import signal
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support import canary, serving, soak
from support.canary import DECOY, FAR, FORWARD_FAULT, ID, LOUD, NEAR, STEP_FAULT, STREAM_FAULT, WORD, sings
from support.checkpoint import save_checkpoint
from support.observed import OPERATOR, Live, keys_of
from support.operations import LocalOperations
from support.otlp import Receiver, receiver
from support.raylets import processes
from support.serving import eventually
from support.soak_killer import REPLICA, WORKER

from gammaray.api import operator
from gammaray.config import Config, parse

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),  # in Ray itself
]
PROMPT = "what the xylographer said"
TENANTS = {"bank": NEAR, "shop": LOUD, "mill": FAR}  # and the drafter of each
TOKENS, LONG = 24, 250  # of an answer; while it comes, somebody crashes
CRASHES = (signal.SIGSEGV, signal.SIGABRT)
FAULTS = (FORWARD_FAULT, STEP_FAULT, STREAM_FAULT)
CASES: tuple[dict[str, Any], ...] = (
    {"n": 2},
    {"stream": True},
    {"temperature": 0.0, "logprobs": 3, "echo": True},
    {"stream": True, "speculation": {"gamma": 2}},
)
BODIES: Mapping[str, Any] = {  # of the operator's routes that want one
    "POST tenants/bank/roll-back": {"what": "policy"},
    "POST tenants/bank/warm-up": {"requests": 2},
    "POST profile": {"steps": 5},
    "POST kill-switch": {"on": True},
    "PUT tenants/bank": {"drafter": NEAR},
    "PATCH tenants/bank": {"weight": 2.0},
}
LAST = ("kill-switch", "DELETE", "PUT")  # of what is asked of the operator's routes: no drafts come after it


@dataclass
class Found:
    """What is left of a run."""

    sinks: dict[str, bytes] = field(default_factory=dict, repr=False)
    texts: list[str] = field(default_factory=list, repr=False)  # that were answered
    core_limits: list[int] = field(default_factory=list)  # bytes, of the processes that crashed
    drafted: float = 0.0
    accepted: float = 0.0
    failures: float = 0.0  # of drafters

    def holding(self, text: str) -> set[str]:
        return {name for name, data in self.sinks.items() if text.encode() in data}


@contextmanager
def private() -> Iterator[Path]:
    """Temporary, home and working folder of every process that starts inside; cores are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    with soak.surroundings() as folder, pytest.MonkeyPatch.context() as patch:
        for name in ("home", "here"):
            (folder / name).mkdir()
        patch.setenv("HOME", str(folder / "home"))
        patch.setattr(tempfile, "tempdir", None)  # it is remembered
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
        try:
            with chdir(folder / "here"):
                yield folder
        finally:
            resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def settings(folder: Path, endpoint: str, hashes: Mapping[str, Any]) -> Config:
    """Everything that writes is on. No drafter is turned off for being rejected."""
    small = {"method": "model", "model": save_checkpoint(folder / "small"), "placement": "split"}
    always = {"fallback_on_alpha_below": 0.0, "disable_on_fallback_rate_above": 1.0, "adaptive": False}
    return parse(
        {
            "target": {"model": save_checkpoint(folder / "target")},
            "drafters": {NEAR: {"method": "ngram"}, LOUD: {"method": "ngram"}, FAR: small},
            "tenants": {
                name: {"drafter": drafter, "api_keys": hashes[name], "speculation": always, "warmup_s": 0}
                for name, drafter in TENANTS.items()
            },
            "server": {
                "port": serving.free_port(),
                "require_api_key": True,
                "operator_keys": hashes[OPERATOR],
                "access_log": str(folder / "here" / "access.jsonl"),
            },
            "controller": {"interval_s": 0.5, "audit_log": str(folder / "here" / "audit.jsonl")},
            "telemetry": {
                "otlp_endpoint": endpoint,
                "trace_ratio": 1.0,
                "prometheus_port": serving.free_port(),
                "log_prompts": True,
                "vllm_names": True,
            },
        },
        "test",
    )


@contextmanager
def application(config: Config, keys: dict[str, str]) -> Iterator[Live]:
    from gammaray.cluster.run import running

    with running(
        config,
        engine_factory=canary.engine,
        tokenizer_factory=canary.tokenizer,
        link_factory=canary.link,
    ) as url:
        yield Live(url, config.target.model, config.telemetry.prometheus_port, keys)


@pytest.fixture(scope="module")
def found() -> Iterator[Found]:
    """All of it happens here; the tests look at what is left."""
    import ray

    assert not ray.is_initialized(), "another cluster's fixture is still there"
    left, (keys, hashes) = Found(), keys_of(TENANTS)
    with private() as folder, receiver() as collector:
        with application(settings(folder, collector.endpoint, hashes), keys) as live:
            import time
            t=[time.time()]
            serve(live, left); t.append(time.time())
            for number in CRASHES:
                crash(live, left, number); t.append(time.time())
            left.sinks |= spoken(live); t.append(time.time())
            left.sinks |= remembered(); t.append(time.time())
        t.append(time.time())
        print("TIMES",[b-a for a,b in zip(t,t[1:])])
        left.sinks |= sent(collector)
        left.sinks |= {f"file {name}": data for name, data in canary.files(folder)}
    yield left


def serve(live: Live, left: Found) -> None:
    """Requests of every kind, and those in which something fails."""
    eventually(lambda: live.count("gammaray_process_up") >= 3)
    asked = [(tenant, PROMPT, case) for tenant in TENANTS for case in CASES]
    asked += [(tenant, PROMPT + chr(fault), {}) for tenant in TENANTS for fault in FAULTS]
    for tenant, prompt, case in asked:
        for route in ("completions", "chat/completions"):
            more = dict(case)
            if route == "chat/completions" and more.pop("logprobs", None):
                more |= {"logprobs": True, "top_logprobs": 3, "echo": None}
            answer(live, left, tenant, prompt, TOKENS, route, {k: v for k, v in more.items() if v is not None})
    left.sinks["metrics before the crashes"] = live.metrics()
    left.drafted, left.accepted, left.failures = (
        live.count(f"gammaray_{name}_total")
        for name in ("spec_drafted", "spec_accepted", "engine_drafter_failures")
    )


def answer(
    live: Live, left: Found, tenant: str, prompt: str, tokens: int, route: str, more: dict[str, Any]
) -> None:
    got = live.ask(tenant, prompt, route, max_tokens=tokens, seed=1, **more)
    left.sinks[f"answer {len(left.sinks)} {tenant} {route} {got.status_code}"] = got.content
    left.texts += texts(got.text)


def texts(body: str) -> list[str]:
    """Of the choices in an answer, or in its events."""
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {")]
    said: dict[int, str] = {}
    for event in events or [body]:
        for choice in json.loads(event).get("choices", ()):
            part = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content")
            said[choice["index"]] = said.get(choice["index"], "") + (part or "")
    return [text.removeprefix(PROMPT) for text in said.values() if text]


def crash(live: Live, left: Found, number: signal.Signals) -> None:
    """Those that hold drafts crash while they draft; the streams go on when they are back."""
    import time
    t=[time.time()]
    eventually(lambda: len(processes(REPLICA)) == len(processes(WORKER)) == 1); t.append(time.time())
    before = live.count("gammaray_spec_drafted_total")
    with ThreadPoolExecutor() as pool:
        for tenant in ("bank", "mill"):
            pool.submit(answer, live, left, tenant, PROMPT, LONG, "completions", {"stream": True})
        eventually(lambda: live.count("gammaray_spec_drafted_total") > before + 20); t.append(time.time())
        crashed = processes(REPLICA, WORKER)
        left.core_limits += [process.rlimit(psutil.RLIMIT_CORE)[0] for process in crashed]
        for process in crashed:
            process.send_signal(number)
        psutil.wait_procs(crashed, timeout=serving.PATIENCE_S); t.append(time.time())
    t.append(time.time())
    print("CRASH",[b-a for a,b in zip(t,t[1:])])
    eventually(lambda: live.count("gammaray_engine_steps_total") > 0)


def spoken(live: Live) -> dict[str, bytes]:
    """What every route for operators says, while requests are drafted."""
    said = {"metrics of the node": live.metrics(), "live page": "\n".join(live.events(2)).encode()}
    said["metrics of the API"] = live.operate("GET", "/metrics").content
    with ThreadPoolExecutor(1) as pool:
        pool.submit(live.ask, "bank", PROMPT, max_tokens=LONG)
        for route in sorted(routes(), key=lambda route: (any(last in route for last in LAST), route)):
            method, path = route.split(" ")
            got = live.operate(method, f"{operator.OPERATOR}/{path}", BODIES.get(route))
            said[f"route {route} {got.status_code}"] = got.content
    return said


def routes() -> list[str]:
    """Of the operator, for the tenant `bank`."""
    nobody: Any = None
    routers = (operator.routes(LocalOperations(nobody, nobody)) if False else operator.routes(nobody),)
    del routers
    made = [*operator.routes(nobody).routes, *operator.warm_up_routes(nobody, nobody, nobody).routes]
    paths = [(method, route.path) for route in made for method in route.methods]  # type: ignore[attr-defined]
    return ["GET health"] + [
        f"{method} {path.removeprefix(operator.OPERATOR + '/').format(name='bank')}" for method, path in paths
    ]


def remembered() -> dict[str, bytes]:
    """Every value of Ray's internal KV."""
    from ray.experimental import internal_kv

    spaces = (None, b"fun", b"session", b"cluster", b"job", b"serve", b"dashboard", b"worker", b"healthcheck")
    return {
        f"kv {space} {key!r}": key + (internal_kv._internal_kv_get(key, namespace=space) or b"")
        for space in spaces
        for key in internal_kv._internal_kv_list(b"", namespace=space)
    }


def sent(collector: Receiver) -> dict[str, bytes]:
    return {
        f"otlp {type(export).__name__} {i}": export.SerializeToString() + str(export).encode()
        for i, export in enumerate(collector.exports)
    }


def test_debug(found: Found) -> None:
    import pprint
    pprint.pprint({n: len(d) for n, d in found.sinks.items()}, width=150)
    print(found)
    for name, data in found.sinks.items():
        if sings(data):
            print(name, canary.around(data)[:2])
    print("DECOY", found.holding(DECOY))
    for t in found.texts: print(t[:40], found.holding(t[:40]))
    for n in found.sinks:
        if 'answer' in n and ' 200' not in n: print(n, found.sinks[n][:300])
    assert 0
