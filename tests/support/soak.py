"""Streams under random kills: two replicas and two tenants with draft workers, on three raylets.

Everything but the models is the product's: Serve, ingress, replicas, engines, draft links, workers, keeper.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from gammaray.api.auth import fingerprint, fresh_key
from gammaray.cluster import local, processes
from gammaray.config import Config, parse
from gammaray.types import Health

from . import raylets, serving, soak_parts
from .checkpoint import save_checkpoint
from .soak_killer import KEEPER, WORKER, Killer, Replicas
from .soak_streams import MAX_GAMMA, MAX_WIDTH, Tally, cases, crowd

TESTS = Path(__file__).parents[1]
NODES, GPUS = ("a", "b"), 3  # of each: a replica, and a draft worker of either tenant
REPLICAS, READERS, CASES = 2, 8, 64
POOLS = {"bank": {"workers": 2}, "shop": {"workers": 1, "max_workers": 2}}
MORE_S = 120.0  # at most, until every kind of fault has come
QUIET_S = 120.0  # for everything to be given back
MACHINES = {"head": raylets.narrowed(raylets.machine(), "", range(0))} | {
    name: raylets.narrowed(raylets.machine(), "", range(GPUS)) for name in NODES
}


@dataclass(slots=True)
class Result:
    """What came of it. `leaks` is what was not given back."""

    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    kills: Counter[str] = field(default_factory=Counter)
    drafts: int = 0
    hits: int = 0  # drafts that had been made while the target verified
    leaks: list[str] = field(default_factory=list)


def soak(seconds: float, seed: int, folder: Path) -> Result:
    """Streams for so long, on a Ray cluster of its own. `folder` is for checkpoints."""
    keys = {tenant: fresh_key() for tenant in POOLS}
    config, result = configuration(folder, keys), Result()
    asked = cases(CASES, seed, config.target.model, list(POOLS))
    processes.adopt_orphans()
    before = processes.descendants()
    with surroundings() as temporary:
        with cluster() as nodes:
            with application(config, nodes) as url:
                replicas = Replicas(REPLICAS)
                killer = Killer(seed, nodes, dict.fromkeys(NODES, GPUS), replicas)
                began = time.monotonic()
                until = partial(goes_on, killer, began + seconds)
                result.tally = disturbed(crowd(url, asked, keys, seed, READERS, until), killer)
                result.seconds, result.kills = time.monotonic() - began, killer.done
                result.leaks += leaks(replicas)
                result.drafts, result.hits = replicas.drafts, replicas.hits
            result.leaks += orphans(raylets.processes("ray::ServeReplica", WORKER, KEEPER))
        result.leaks += orphans([*processes.descendants() - before])
        result.leaks += [f"file {path.name}" for path in temporary.iterdir() if path.name != "ray"]
    return result


def configuration(folder: Path, keys: dict[str, str]) -> Config:
    """The checkpoints tell placement their sizes; nobody loads them."""
    target, small = save_checkpoint(folder / "target", layers=4), save_checkpoint(folder / "small")
    common = {
        "drafter": soak_parts.DRAFTER,
        "speculation": {"gamma": MAX_GAMMA, "tree_width": MAX_WIDTH},
    }
    tenants: dict[str, Any] = {
        name: {
            **common,
            "pool": POOLS[name],
            "api_keys": [{"name": name, "sha256": fingerprint(key.encode())}],
        }
        for name, key in keys.items()
    }
    drafter = {"method": "model", "model": small, "placement": "split"}
    return parse(
        {
            "target": {"model": target, "replicas": REPLICAS},
            "drafters": {soak_parts.DRAFTER: drafter},
            "tenants": tenants,
            "server": {"port": serving.free_port(), "require_api_key": True},
        },
        "soak",
    )


@contextmanager
def surroundings() -> Iterator[Path]:
    """What Ray's processes find: a temporary folder of their own, and the modules of these tests.

    Its path is short, as Ray puts Unix sockets into it.
    """
    folder, before = Path(tempfile.mkdtemp(prefix="soak")), dict(os.environ)
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    os.environ.update({"TMPDIR": str(folder), "PYTHONPATH": path})
    os.environ.update(local.environment(os.environ, local=True))
    tempfile.tempdir = None  # what it found before; this process is one of those that meet there
    try:
        yield folder
    finally:
        tempfile.tempdir = None
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def cluster() -> Iterator[raylets.Raylets]:
    nodes = raylets.Raylets()
    try:
        for name in NODES:
            nodes.add(name, GPUS)
        yield nodes
    finally:
        nodes.close()


@contextmanager
def application(config: Config, nodes: raylets.Raylets) -> Iterator[str]:
    from gammaray.cluster.run import running

    with running(
        config,
        nodes.address,
        probe=partial(raylets.probe_by_label, MACHINES),
        link_factory=soak_parts.link,
        engine_factory=soak_parts.engine,
        tokenizer_factory=soak_parts.tokenizer,
    ) as url:
        yield url


def goes_on(killer: Killer, end: float) -> bool:
    """Longer where a slow machine has not seen every kind of fault by then."""
    return time.monotonic() < end + (0.0 if killer.has_done_all else MORE_S)


def disturbed(streams: Coroutine[Any, Any, Tally], killer: Killer) -> Tally:
    """The killer has this thread: Ray starts raylets on the main one only."""
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(asyncio.run, streams)
        run.add_done_callback(lambda _: killer.stop())
        killer.run()
    return run.result()


def leaks(replicas: Replicas) -> list[str]:
    """What replicas and draft workers still hold when nobody asks for anything, after a while."""
    deadline = time.monotonic() + QUIET_S
    while (found := [*held(replicas)]) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def held(replicas: Replicas) -> Iterator[str]:
    import ray

    from gammaray.actors.crew import NAMESPACE
    from gammaray.actors.keeper import NAME

    for number, health in enumerate(replicas.health()):
        if health is None or health.state != "ok" or holds(health):
            yield f"replica {number}: {health}"
    try:
        pools = ray.get(ray.get_actor(NAME, NAMESPACE).reports.remote(), timeout=serving.PATIENCE_S)
    except Exception as error:  # of Ray, when there is none at the moment
        yield f"no keeper: {error}"
        return
    for tenant, settings in POOLS.items():
        reports = pools.get((tenant, soak_parts.DRAFTER), ())
        if len(reports) < settings["workers"]:
            yield f"{tenant}: {len(reports)} workers are up"
        yield from (f"{r.post.name}: {r.load}" for r in reports if r.load.sequences)


def holds(health: Health) -> int:
    return health.running + health.waiting + health.kv_used_blocks


def orphans(left: Sequence[psutil.Process]) -> list[str]:
    """Those that do not end by themselves; they are killed."""
    _, alive = psutil.wait_procs(left, timeout=QUIET_S)
    found = [f"process {process.pid} {process.name()}" for process in alive]
    processes.kill(alive)
    return found
