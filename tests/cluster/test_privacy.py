"""Drafts that were rejected stay in memory: no sink of a real run has one, whatever fails or crashes."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import signal
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support import canary, serving, soak
from support.canary import (
    DECOY,
    FAR,
    FORWARD_FAULT,
    ID,
    LOUD,
    NEAR,
    STEP_FAULT,
    STREAM_FAULT,
    WORD,
    around,
    sings,
)
from support.checkpoint import save_checkpoint
from support.observed import OPERATOR, Live, keys_of
from support.otlp import Receiver, receiver
from support.raylets import processes
from support.serving import eventually
from support.soak_killer import KEEPER, REPLICA, WORKER

from gammaray.api import operator
from gammaray.api.auth import OPERATOR as PREFIX
from gammaray.config import Config, parse

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),  # in Ray itself
]
PROMPT = "what the xylographer said"
NEAR_BY, FAR_OFF = "bank", "mill"
TENANTS = {NEAR_BY: NEAR, "shop": LOUD, FAR_OFF: FAR}  # and the drafter of each
WHO = ("replica", "worker", "ingress")
ROUTES = COMPLETIONS, CHAT = "completions", "chat/completions"
KV_SPACES = (None, b"fun", b"session", b"cluster", b"job", b"serve", b"dashboard", b"worker", b"healthcheck")
TOKENS, LONG = 16, 250  # of an answer; while a long one comes, somebody crashes
CRASHES = {signal.SIGSEGV: (REPLICA, WORKER), signal.SIGABRT: (REPLICA,)}  # and who crashes
ALLOW_CORES = """\
from resource import RLIMIT_CORE, getrlimit, setrlimit
_, hard = getrlimit(RLIMIT_CORE)
setrlimit(RLIMIT_CORE, (hard, hard))
"""
INGRESS = "ray::ServeReplica:gammaray:ingress"
FAULTS = (FORWARD_FAULT, STEP_FAULT, STREAM_FAULT)
CASES: tuple[dict[str, Any], ...] = (
    {"n": 2},
    {"stream": True},
    {"temperature": 0.0},
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
    numbers: Iterator[int] = field(default_factory=count)  # of the answers
    core_limits: dict[str, int] = field(default_factory=dict)  # bytes, by process
    drafted: float = 0.0
    accepted: float = 0.0
    failures: float = 0.0  # of drafters

    def holding(self, text: str) -> set[str]:
        return {name for name, data in self.sinks.items() if text.encode() in data}


@contextmanager
def private() -> Iterator[Path]:
    """Temporary, home and working folder of every process that starts inside. Those in Python may dump core.

    This process may not: gRPC's threads sometimes abort in a fork of it, before that becomes a part of Ray.
    """
    with soak.surroundings() as folder, pytest.MonkeyPatch.context() as patch:
        for name in ("home", "here", "site"):
            (folder / name).mkdir()
        (folder / "site" / "sitecustomize.py").write_text(ALLOW_CORES)
        patch.setenv("PYTHONPATH", str(folder / "site"), prepend=os.pathsep)
        patch.setenv("HOME", str(folder / "home"))
        patch.setattr(tempfile, "tempdir", None)  # it is remembered
        with chdir(folder / "here"):
            yield folder


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
            serve(live, left)
            for number in CRASHES:
                crash(live, left, number)
            left.sinks |= spoken(live)
            left.sinks |= remembered()
        left.sinks |= sent(collector)
        left.sinks |= {f"file {name}": data for name, data in canary.files(folder)}
    yield left


def serve(live: Live, left: Found) -> None:
    """Requests of every kind, and those in which something fails: a step that does fails for all."""
    eventually(lambda: live.count("gammaray_process_up") >= 3)
    with ThreadPoolExecutor(4) as pool:
        cases = [(tenant, case, route) for tenant in TENANTS for case in CASES for route in ROUTES]
        for _ in pool.map(lambda each: answer(live, left, each[0], PROMPT, each[2], **each[1]), cases):
            pass
    for tenant, fault in product(TENANTS, FAULTS):
        answer(live, left, tenant, PROMPT + chr(fault), stream=fault == STREAM_FAULT)
    left.sinks["metrics before the crashes"] = live.metrics()
    left.drafted, left.accepted, left.failures = (
        live.count(f"gammaray_{name}_total")
        for name in ("spec_drafted", "spec_accepted", "engine_drafter_failures")
    )


def answer(live: Live, left: Found, tenant: str, prompt: str, route: str = COMPLETIONS, **more: Any) -> None:
    got = live.ask(tenant, prompt, route, **{"max_tokens": TOKENS, "seed": 1, **more})
    left.sinks[f"answer {next(left.numbers)} {tenant} {route} {got.status_code}"] = got.content
    left.texts += texts(got.text)


def texts(body: str) -> list[str]:
    """Of the choices in an answer, or in its events; those that are long enough to be known again."""
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {")]
    said: dict[int, str] = defaultdict(str)
    for event in events or [body]:
        for choice in json.loads(event).get("choices", ()):
            part = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content")
            said[choice["index"]] += part or ""
    return [text for text in said.values() if len(text) >= TOKENS]


def crash(live: Live, left: Found, number: signal.Signals) -> None:
    """Those that hold drafts crash while they draft; the streams go on when they are back."""
    eventually(lambda: len(processes(REPLICA)) == len(processes(WORKER)) == 1)
    before = live.count("gammaray_spec_drafted_total")
    with ThreadPoolExecutor() as pool:
        for tenant in (NEAR_BY, FAR_OFF):
            pool.submit(answer, live, left, tenant, PROMPT, max_tokens=LONG, stream=True)
        eventually(lambda: live.count("gammaray_spec_drafted_total") > before + 20)
        left.core_limits |= {
            kind: process.rlimit(psutil.RLIMIT_CORE)[0]
            for kind in (REPLICA, WORKER, INGRESS, KEEPER)
            for process in processes(kind)
        }
        for process in processes(*CRASHES[number]):
            process.send_signal(number)
    eventually(lambda: drafts_again(live))  # its stream may have ended before its worker was back


def drafts_again(live: Live) -> bool:
    """If not, one more is asked, which is not among the answers: how many it takes depends on the machine."""
    if live.count("gammaray_spec_drafted_total", tenant=FAR_OFF) > 0:
        return True
    live.ask(FAR_OFF, PROMPT, max_tokens=TOKENS)
    return False


def spoken(live: Live) -> dict[str, bytes]:
    """What every route for operators says, while there are drafts."""
    said = {"metrics of the node": live.metrics(), "live page": "\n".join(live.events(2)).encode()}
    said["metrics of the API"] = live.operate("GET", "/metrics").content
    with ThreadPoolExecutor(1) as pool:
        pool.submit(live.ask, NEAR_BY, PROMPT, max_tokens=LONG, temperature=0.0)
        for route in sorted(routes(), key=lambda route: (any(last in route for last in LAST), route)):
            method, path = route.split(" ")
            got = live.operate(method, f"{PREFIX}/{path}", BODIES.get(route))
            said[f"route {route} {got.status_code}"] = got.content
    return said


def routes() -> list[str]:
    """Of the operator, for the tenant `bank`."""
    nobody: Any = None  # they ask only when they are asked
    made = [*operator.routes(nobody).routes, *operator.warm_up_routes(nobody, nobody, nobody).routes]
    paths = [(method, route.path) for route in made for method in route.methods]  # type: ignore[attr-defined]
    return [
        "GET health",
        *(f"{how} {path.removeprefix(f'{PREFIX}/').format(name=NEAR_BY)}" for how, path in paths),
    ]


def remembered() -> dict[str, bytes]:
    """Every value of Ray's internal KV."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    return {
        f"kv {space!r} {key!r}": key + (_internal_kv_get(key, namespace=space) or b"")
        for space in KV_SPACES
        for key in _internal_kv_list(b"", namespace=space)
    }


def sent(collector: Receiver) -> dict[str, bytes]:
    return {
        f"otlp {type(export).__name__} {i}": export.SerializeToString() + str(export).encode()
        for i, export in enumerate(collector.exports)
    }


def test_drafts_were_made_and_all_of_them_rejected(found: Found) -> None:
    assert found.drafted > 200 and found.accepted == 0 and found.failures > 20  # how many more, time tells
    links = json.loads(found.sinks["route GET health 200"])["engine"]["links"]
    assert [link["drafts"] > 0 for link in links] == [True]
    statuses = Counter(name.rpartition(" ")[2] for name in found.sinks if name.startswith("answer"))
    assert statuses["500"] == len(TENANTS) * 2  # a stream has begun with 200 when it fails
    assert statuses["200"] == len(TENANTS) * (len(CASES) * len(ROUTES) + 1) + 2 * len(CRASHES)


def test_no_sink_has_a_rejected_token(found: Found) -> None:
    assert {name: around(data)[0] for name, data in found.sinks.items() if sings(data)} == {}


def test_prompts_and_texts_are_in_the_access_log_and_nowhere_else(found: Found) -> None:
    assert len(found.texts) > 30
    for text in {PROMPT, *found.texts}:
        holding = {name for name in found.holding(text) if not name.startswith("answer ")}
        assert holding == {"file here/access.jsonl"}


def test_crashes_leave_no_core_behind(found: Found) -> None:
    allowed = resource.getrlimit(resource.RLIMIT_CORE)[1]  # to those that see nothing, as to the keeper
    assert found.core_limits == {REPLICA: 0, WORKER: 0, INGRESS: 0, KEEPER: allowed}
    assert [name for name in found.sinks if re.match(r"file (.*/)?core(\.\d+)?$", name)] == []


SINKS = {  # what is surely there -> in which sinks it must be found, by their names
    f"log of replica: {DECOY}": [r"serve/replica_gammaray_target_\w+\.log"],
    f"log of ingress: {DECOY}": [r"serve/replica_gammaray_ingress_\w+\.log"],
    f"log of worker: {DECOY}": [r"worker-.*\.err"],
    **{f"{what} of {who}: {DECOY}": [r"file .*/logs/.*"] for what in ("stdout", "stderr") for who in WHO},
    **{f"file of {who}: {DECOY}": [r"file tmp\w+/decoy"] for who in WHO},
    "SIGSEGV": [r"worker-.*\.err"],
    "SIGABRT": [r"worker-.*\.err"],
    '"traceEvents"': [r"file gammaray-profile-\w+/trace.json"],
    NEAR_BY: [
        *("metrics before the crashes", "metrics of the node", "metrics of the API", "live page"),
        *("otlp ExportMetricsServiceRequest", "otlp ExportTraceServiceRequest"),
        *(r"kv None b'gammaray controller: memory/bank'", r"kv None b'gammaray controller: journal/records'"),
        *(r"kv b'serve' .*deployment-state", r"file here/audit\.jsonl", r"file here/access\.jsonl"),
        *(r"route GET overview 200", r"route GET histograms 200", r"route GET tenants/bank 200"),
    ],
}


@pytest.mark.parametrize("planted", SINKS)
def test_sinks_are_there_and_searched(found: Found, planted: str) -> None:
    holding = found.holding(planted)
    for sink in SINKS[planted]:
        assert any(re.search(sink, name) for name in holding), sink


@pytest.mark.parametrize(
    "data",
    [
        f"a log: {WORD!r}".encode(),
        str(canary.song()).encode(),
        json.dumps({"tokens": [1, ID]}).encode(),
        pickle.dumps({"tokens": (ID,)}),
        np.array([3, ID]).tobytes(),
        np.array([ID, ID], np.int32).tobytes(),
        np.array([ID], np.float64).tobytes(),
        b'label="%d"} 3' % ID,
    ],
)
def test_the_search_finds_a_canary(data: bytes) -> None:
    assert sings(data)
    assert not sings(data.replace(WORD.encode(), b"").replace(str(ID).encode(), b"1%d0.%d1" % (ID, ID))) or (
        str(ID).encode() not in data and WORD.encode() not in data
    )
