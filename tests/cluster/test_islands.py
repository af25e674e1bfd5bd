"""A plan carried out on several raylets of this machine, whose GPUs exist in Ray's books alone.

One Ray cluster for all: machines `head` and `a` with one raylet for 8 GPUs, and `c` with one for each of its
two NVLink islands. This process is connected to it inside a test only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import raylets, serving
from support.checkpoint import save_checkpoint
from support.serving import eventually, word

from gammaray.actors.draft import Post
from gammaray.actors.place import Place
from gammaray.actors.target import Slot
from gammaray.cluster import local
from gammaray.cluster.demand import demand
from gammaray.cluster.placement import plan
from gammaray.cluster.plans import Plan
from gammaray.config import Config, parse
from gammaray.engine.build import build_engine
from gammaray.engine.local import run
from gammaray.errors import ConfigError, EngineFailure, GammarayError, VocabularyMismatch
from gammaray.types import GenerateRequest, SamplingParams

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),  # in Ray itself
]
QUADS = (range(4), range(4, 8))
MACHINES = {"a": raylets.machine(), "head": raylets.machine(), "c": raylets.machine(QUADS)}
TOKENS = 200


@pytest.fixture(scope="module")
def nodes() -> Iterator[raylets.Raylets]:
    os.environ.update(local.environment(os.environ, local=True))
    import ray

    assert not ray.is_initialized(), "another cluster's fixture is still there"
    for module in (serving, raylets, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)
    cluster = raylets.Raylets()
    try:
        cluster.add("a")
        for island, quad in enumerate(QUADS):
            cluster.add("c", 4, str(island), ",".join(map(str, quad)))
        yield cluster
    finally:
        cluster.close()


@contextmanager
def connected(nodes: raylets.Raylets) -> Iterator[None]:
    import ray

    ray.init(nodes.address, namespace="gammaray", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def names(*gpus: int) -> list[frozenset[str]]:
    return [frozenset({str(gpu), f"GPU-{gpu}"}) for gpu in gpus]


def free(gpus: dict[str, float]) -> bool:
    import ray

    return {name: ray.available_resources().get(name) for name in gpus} == gpus


def test_leases_are_exact_and_name_what_is_taken(nodes: raylets.Raylets) -> None:
    import ray

    from gammaray.cluster.lease import leased
    from gammaray.cluster.nodes import nodes as known

    with connected(nodes):
        total = {"GPU": ray.cluster_resources()["GPU"]}
        assert total == {"GPU": 24.0}
        assert [(node.name, node.gpus) for node in known()] == [("a", 8), ("c/0", 4), ("c/1", 4), ("head", 8)]
        with leased({"a": names(6, 3), "head": names(0), "c/1": names(7, 5)}, known()) as held:
            assert held == {"a": ["6", "3"], "head": ["0"], "c/1": ["7", "5"]}
            eventually(lambda: free({"GPU": 19.0}))
            other = ray.remote(num_gpus=6, label_selector={"gammaray/node": "a"})(_gpus).remote()
            assert sorted(ray.get(other)) == ["0", "1", "2", "4", "5", "7"]
        eventually(lambda: free(total))
        # A run after a crash takes back what is left:
        with leased({"head": names(2)}, known()), leased({"head": names(2, 1)}, known()) as held:
            assert held == {"head": ["2", "1"]}
        eventually(lambda: free(total))
        holder = ray.remote(num_gpus=1, label_selector={"gammaray/node": "head"})(Holder).remote()
        taken = ray.get(holder.gpus.remote())
        message = rf"GPU {taken[0]} or GPU-{taken[0]} of node head is held by another job"
        with (
            pytest.raises(GammarayError, match=message),
            leased({"a": names(1), "head": names(4, int(taken[0]))}, known(), patience_s=5.0),
        ):
            raise AssertionError
        ray.kill(holder)
        eventually(lambda: free(total))


def test_a_drafter_that_cannot_be_served_is_named(nodes: raylets.Raylets, config: Config) -> None:
    from gammaray.cluster import drafts

    def refuse(config: Config, drafter: str) -> serving.IdleLink:
        raise VocabularyMismatch(10, 20, drafter)

    posts = (Post("shop", "two", "1", 0, Place({"gammaray/node": "a"}, ("GPU-1",))),)
    said: list[str] = []
    with connected(nodes), drafts.working(config, posts, refuse) as staff:
        with pytest.raises(ConfigError, match="drafter 'two' has a vocabulary of 20 tokens"):
            drafts.wait(staff, config, posts, lambda: None, said.append)
        assert len(raylets.processes("ray::KeeperActor")) == 1
    eventually(lambda: not raylets.processes("ray::KeeperActor", "ray::DraftWorker"))


def _gpus() -> list[str]:
    import ray

    return [str(gpu) for gpu in ray.get_gpu_ids()]


class Holder:
    """Another job."""

    def gpus(self) -> list[str]:
        return _gpus()


@dataclass
class Served:
    """An application that runs as `plan` says."""

    url: str
    model: str
    log: Path
    plan: Plan
    keeper: Any

    def targets(self) -> list[dict[str, Any]]:
        """What each start of an engine wrote, from inside its process."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def workers(self) -> dict[str, Any]:
        """Reports of the draft workers, from inside their processes, by name."""
        import ray

        known = ray.get(self.keeper().reports.remote())
        return {report.post.name: report for reports in known.values() for report in reports}

    def pids(self) -> dict[str, int]:
        return {name: report.address[1] for name, report in self.workers().items()}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Two tenants with a drafter each, one of which has two workers."""
    folder = tmp_path_factory.mktemp("checkpoints")
    target, small = save_checkpoint(folder / "target", layers=4), save_checkpoint(folder / "small")
    drafter = {"method": "model", "model": small, "placement": "split"}
    return parse(
        {
            "target": {"model": target, "replicas": 2},
            "drafters": {"one": drafter, "two": drafter},
            "tenants": {
                "bank": {"drafter": "one", "pool": {"workers": 2}},
                "shop": {"drafter": "two"},
            },
            "server": {"port": serving.free_port()},
        },
        "test",
    )


@pytest.fixture(scope="module")
def served(
    nodes: raylets.Raylets, config: Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    import ray

    from gammaray.actors.crew import NAMESPACE
    from gammaray.actors.keeper import NAME
    from gammaray.cluster.run import running

    log = tmp_path_factory.mktemp("islands") / "log"
    found = [raylets.narrowed(MACHINES[name], name, range(8)) for name in ("a", "head")]
    found += [raylets.narrowed(MACHINES["c"], f"c/{i}", quad) for i, quad in enumerate(QUADS)]
    with running(
        config,
        nodes.address,
        probe=partial(raylets.probe_by_label, MACHINES),
        link_factory=lambda config, drafter: serving.IdleLink(drafter),
        engine_factory=lambda config, *around: serving.PlacedEngine(log, *around),
        tokenizer_factory=lambda _: serving.ByteTokenizer(),
    ) as url:
        yield Served(
            url, config.target.model, log, plan(found, demand(config)), lambda: ray.get_actor(NAME, NAMESPACE)
        )
        before = raylets.processes("ray::ServeReplica", "ray::DraftWorker", "ray::KeeperActor")
        assert len(before) > 4
    eventually(lambda: not any(process.is_running() for process in before))


def node_of(labels: Mapping[str, str]) -> str:
    return "/".join(labels[key] for key in ("gammaray/node", "gammaray/island") if key in labels)


def test_everything_is_where_the_plan_says(served: Served) -> None:
    import ray

    targets = [p for p in served.plan.placements if p.role == "target"]
    drafts = [p for p in served.plan.placements if p.role == "draft"]
    assert (len(targets), len(drafts)) == (2, 3)
    assert {p.mode for p in served.plan.placements} == {"split"}
    found = [(t["node"], tuple(t["devices"])) for t in served.targets()]
    assert sorted(found) == sorted((p.node, p.uuids) for p in targets)
    workers = served.workers().values()
    assert sorted(
        (r.post.tenant, r.address[0], r.post.worker, node_of(r.where.labels), r.where.devices)
        for r in workers
    ) == sorted((p.tenant, p.drafter, p.worker, p.node, p.uuids) for p in drafts)
    used = {(p.node, gpu) for p in served.plan.placements for gpu in p.gpus}
    assert ray.available_resources()["GPU"] == 24 - len(used)
    # Replicas hear of the workers:
    told = {f"{target['pid']} knows 3" for target in served.targets()}
    eventually(lambda: told <= set(served.log.read_text().splitlines()))


def test_a_draft_worker_that_is_killed_comes_back_on_its_device(served: Served) -> None:
    before = served.workers()
    name, report = next(iter(before.items()))
    raylets.worker(report.address[1]).kill()
    eventually(lambda: served.pids().get(name, report.address[1]) != report.address[1])
    again = served.workers()
    assert again[name].where == report.where
    assert {n: r for n, r in again.items() if n != name} == {n: r for n, r in before.items() if n != name}


def test_a_keeper_that_is_killed_loses_nothing(served: Served) -> None:
    import ray

    before = served.pids()
    keeper = served.keeper()
    ray.kill(keeper, no_restart=False)
    eventually(lambda: answers(served) == before)


def answers(served: Served) -> dict[str, int]:
    """Nothing while there is no keeper."""
    try:
        return served.pids()
    except Exception:
        return {}


def stream(served: Served, seed: int) -> str:
    """The text; the stream must end as it should."""
    body = {"model": served.model, "prompt": "hi", "max_tokens": TOKENS, "seed": seed, "stream": True}
    text = ""
    with httpx.stream(
        "POST", f"{served.url}/v1/completions", json=body, timeout=serving.PATIENCE_S
    ) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        text += json.loads(line)["choices"][0]["text"]
    return text


@contextmanager
def streams(served: Served, *seeds: int) -> Iterator[None]:
    """Open while the body runs; all must end with the text of an undisturbed run."""
    before = served.log.read_text().count("started")
    with ThreadPoolExecutor(len(seeds)) as pool:
        found = [pool.submit(stream, served, seed) for seed in seeds]
        eventually(lambda: served.log.read_text().count("started") >= before + len(seeds))
        time.sleep(0.5)  # some chunks on their way
        yield
        for seed, text in zip(seeds, found, strict=True):
            assert text.result() == "".join(word(seed, i) for i in range(TOKENS))


def test_streams_of_a_replica_that_is_killed_go_on_at_the_other(served: Served) -> None:
    victim = served.targets()[0]
    with streams(served, 1, 2, 3, 4):
        raylets.worker(victim["pid"]).kill()
    # and the replica is back where it was:
    eventually(lambda: len(served.targets()) == 3)
    again = served.targets()[-1]
    assert again["pid"] != victim["pid"]
    assert (again["node"], again["devices"]) == (victim["node"], victim["devices"])


def test_ranks_of_a_target_compute_together_and_end_with_it(served: Served) -> None:
    import ray

    from gammaray.actors.target import ReplicaSettings, TargetReplica, local_engine

    request = GenerateRequest("r", (5, 6, 7), SamplingParams(max_tokens=20, temperature=1.0, seed=3))
    alone = parse({"target": {"model": served.model, "dtype": "float32"}}, "test")
    shared = parse({"target": {"model": served.model, "dtype": "float32", "tensor_parallel": 2}}, "test")
    first, second = (Place({"gammaray/node": "a"}, (f"GPU-{i}",)) for i in (6, 7))
    settings = ReplicaSettings(1, True, Slot(0, first, (second,)))
    actor = ray.remote(num_cpus=0)(TargetReplica).options(**first.options())
    replica = actor.remote(shared, local_engine, settings)
    chunks = replica.generate.options(num_returns="streaming").remote(request)
    ids = [i for chunk in chunks for i in ray.get(chunk).ids]
    assert tuple(ids) == run(build_engine(alone), request).ids
    ray.get(replica.check_health.remote())
    assert len(raylets.processes("ray::Fellow")) == 1
    ray.kill(replica)
    eventually(lambda: not raylets.processes("ray::Fellow"))
    other = actor.remote(shared, lambda *_: serving.SlowEngine(served.log), settings)
    assert not unhealthy(other)
    eventually(lambda: len(raylets.processes("ray::Fellow")) == 1)
    raylets.processes("ray::Fellow")[0].kill()
    eventually(lambda: unhealthy(other))
    ray.kill(other)


def unhealthy(replica: Any) -> bool:
    import ray

    try:
        ray.get(replica.check_health.remote())
    except EngineFailure:
        return True
    return False


def test_a_node_that_is_lost_and_comes_back(served: Served, nodes: raylets.Raylets) -> None:
    lost = next(target["node"] for target in served.targets())
    posts = {name for name, report in served.workers().items() if node_of(report.where.labels) == lost}
    starts = len(served.targets())
    with streams(served, 5, 6, 7, 8):
        nodes.kill(lost)
    eventually(lambda: not posts & answers(served).keys())
    assert stream(served, 9) == "".join(word(9, i) for i in range(TOKENS))
    assert len(served.targets()) == starts  # its devices are nowhere else
    _, _, island = lost.partition("/")
    nodes.add("c", 4, island, ",".join(map(str, QUADS[int(island)])))
    eventually(lambda: len(served.targets()) == starts + 1)
    again, first = served.targets()[-1], next(t for t in served.targets() if t["node"] == lost)
    assert (again["node"], again["devices"]) == (first["node"], first["devices"])
    eventually(lambda: posts <= answers(served).keys())
