"""`make chaos`: 200 concurrent streams, of which some leave or run out of time, and a replica that is killed.

Every request runs undisturbed first. Then all run at once, and a kill -9 of the target replica comes in the
middle. A stream that lives on must say what it said undisturbed, one whose time is over must end with that
error, and in the end no KV block may be in use, a SIGTERM must end the server with 0, and no process may be
left. ARGS: `--streams N`, `--seed N`, `--no-kill`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import chaos_report as report
import httpx
import yaml
from chaos_requests import MODEL, SHARES, Case, mix
from chaos_run import disturbed, undisturbed
from environments import WORK
from server import Server, free_port, running

from gammaray.api.auth import fingerprint, fresh_key

OPERATOR = "operator"
MAX_BATCH = 48
KV = {"block_size": 1, "num_blocks": 960}  # too few for so many sequences: some are preempted
LIMIT_S = 600.0  # for both runs
QUIET_S = 30.0  # for the engine to drop what its readers left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-kill", action="store_true", help="let the replica live")
    options = parser.parse_args()
    cases = mix(options.streams, options.seed)
    keys = {name: fresh_key() for name in (*SHARES, OPERATOR)}
    config, port = WORK / "chaos.yaml", free_port()
    WORK.mkdir(exist_ok=True)
    config.write_text(yaml.safe_dump(configuration(keys)))
    command: list[str | Path] = [
        Path(sys.executable).with_name("gammaray"),
        "serve",
        str(config),
        "--port",
        str(port),
    ]
    with running(command, port, WORK / "chaos.log", threads=2) as server:
        faults = asyncio.run(bounded(server, cases, keys, kill=not options.no_kill))
    faults += report.stop(server)
    print("\n".join(f"failed: {fault}" for fault in faults) or "ok")
    return bool(faults)


def configuration(keys: Mapping[str, str]) -> dict[str, Any]:
    """Three tenants, whose drafts differ in everything that a tenant decides."""

    def entry(name: str) -> list[dict[str, str]]:
        return [{"name": name, "sha256": fingerprint(keys[name].encode())}]

    policies: dict[str, dict[str, Any]] = {
        "crowd": {"drafter": "long", "speculation": {"gamma": 8, "tree_width": 2}},
        "team": {"drafter": "short", "speculation": {"gamma": 4, "verification": "rejection"}},
        "plain": {"drafter": None},
    }
    return {
        "target": {
            "model": MODEL,
            "dtype": "float32",
            "max_model_len": 512,
            "max_batch": MAX_BATCH,
            "kv": KV,
        },
        "drafters": {
            "long": {"method": "ngram", "max_ngram": 4, "min_ngram": 2},
            "short": {"method": "ngram", "max_ngram": 2, "min_ngram": 1},
        },
        "tenants": {name: {"api_keys": entry(name), **policy} for name, policy in policies.items()},
        "server": {"require_api_key": True, "operator_keys": entry(OPERATOR)},
    }


async def bounded(server: Server, cases: Sequence[Case], keys: Mapping[str, str], kill: bool) -> list[str]:
    """Both runs. Returns what was wrong."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    client = httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S, limits=limits, trust_env=False)
    try:
        async with asyncio.timeout(LIMIT_S), client:
            return await chaos(client, server, cases, keys, kill)
    except TimeoutError:
        return [f"not done after {LIMIT_S:.0f} s"]


async def chaos(
    http: httpx.AsyncClient, server: Server, cases: Sequence[Case], keys: Mapping[str, str], kill: bool
) -> list[str]:
    before = await health(http, keys[OPERATOR])
    calm = await undisturbed(http, cases, keys)
    report.undisturbed(calm)
    if unwell := [*report.incomplete(cases, calm)]:
        return unwell
    rough = await disturbed(http, server, cases, keys, kill)
    faults = [*report.disturbed(cases, rough), *report.ends(cases, rough, calm)]
    faults += report.fairness(cases, rough, queue=2 * MAX_BATCH)
    after = await quiet(http, keys[OPERATOR], before)
    print(f"engine: {after}", flush=True)
    if not same(after, before):
        faults.append(f"the engine was {before} before all this, and now it is {after}")
    return faults


async def health(http: httpx.AsyncClient, key: str) -> dict[str, Any]:
    """The engine's part of the operator's report."""
    response = await http.get("/gammaray/v1/health", headers={"Authorization": f"Bearer {key}"})
    engine: dict[str, Any] = response.json()["engine"]
    return engine


async def quiet(http: httpx.AsyncClient, key: str, before: dict[str, Any]) -> dict[str, Any]:
    """The engine's health as soon as it is what it was before, or after a while."""
    deadline = time.monotonic() + QUIET_S
    while not same(now := await health(http, key), before) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return now


def same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return {**now, "since_step_s": 0} == {**before, "since_step_s": 0}


if __name__ == "__main__":
    sys.exit(main())
