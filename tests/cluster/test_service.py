"""An application that Serve is told to deploy, on raylets that stand for the pods of a chart.

Pods of the pool `gpu` have two linked GPUs, in Ray's books alone; the pool `web` is for the ingress.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import declared, raylets, serving
from support.checkpoint import save_checkpoint
from support.serving import eventually, word

from gammaray.cluster import deployments, local

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),  # in Ray itself
]
KEY = "an-operators-key"
STEWARD, CONTROLLER = "ray::Steward", "ray::ControllerActor"
STARTING_S = 180.0  # of processes, where cores are shared
HEAD_GPUS = 8.0  # which belong to no pool
WORKERS, KEEPER, TARGETS = "ray::DraftWorker", "ray::KeeperActor", "ray::ServeReplica:gammaray:target"


class Declared:
    """Pods, and what is declared to run on them."""

    def __init__(self, pods: raylets.Raylets, folder: Path, log: Path) -> None:
        self.pods, self.log = pods, log
        self.url = f"http://127.0.0.1:{serving.free_port()}"
        target, small = save_checkpoint(folder / "target", layers=4), save_checkpoint(folder / "small")
        self.config: dict[str, Any] = {
            "target": {"model": target, "replicas": 2},
            "drafters": {"one": {"method": "model", "model": small, "placement": "split"}},
            "tenants": {"bank": {"drafter": "one", "pool": {"workers": 2}}},
            "telemetry": {"prometheus_port": serving.free_port()},
            "server": {},
        }
        (folder / "keys/operator").mkdir(parents=True)
        (folder / "keys/operator/ops").write_text(KEY)
        self.keys = str(folder / "keys")

    def deploy(self, **config: Any) -> None:
        self.config |= config
        args = {
            "config": self.config,
            "pools": {"gpu": 2, "web": 1},
            "ingress": {"pool": "web", "replicas": 1},
            "keys": self.keys,
        }
        app = {
            "name": "gammaray",
            "route_prefix": "/",
            "import_path": "support.declared:application",
            "args": args,
        }
        host, port = self.url.removeprefix("http://").split(":")
        http = {"host": host, "port": int(port)}
        declared.deploy({"proxy_location": "EveryNode", "http_options": http, "applications": [app]})

    def ingress(self) -> set[str]:
        """Nodes with an ingress."""
        import ray
        from ray.serve.context import _get_global_client

        names = {node["NodeID"]: node["Labels"]["gammaray/node"] for node in ray.nodes()}
        parts = _get_global_client().get_serve_details()["applications"]["gammaray"]["deployments"]
        return {names[replica["node_id"]] for replica in parts["ingress"]["replicas"]}

    def add(self, name: str) -> None:
        self.pods.add(name, 2, visible=",".join(map(str, declared.PODS[name])), pool="gpu")

    def ready(self) -> bool:
        return declared.ready(self.url)

    def chat(self, seed: int) -> str:
        body = {"model": self.config["target"]["model"], "prompt": "hi", "max_tokens": 5, "seed": seed}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=serving.PATIENCE_S)
        text: str = answer.json()["choices"][0]["text"]
        return text

    def seats(self) -> set[tuple[str, str, int]]:
        """As the controller tells them to an operator."""
        headers = {"Authorization": f"Bearer {KEY}"}
        told = httpx.get(f"{self.url}/gammaray/v1/topology", headers=headers, timeout=30).json()
        return {(seat["node"], seat["what"], seat["gpu"]) for seat in told["seats"]}

    def starts(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Where engines started last, and the processes that they are in."""
        lines = (json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{"))
        return {(one["node"], tuple(one["devices"])): one["pid"] for one in lines}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Declared]:
    folder = tmp_path_factory.mktemp("declared")
    log = folder / "log"
    os.environ.update(local.environment(os.environ, local=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(declared.LOG, str(log))
        patch.setenv("PYTHONPATH", declared.TESTS)
        import ray

        assert not ray.is_initialized(), "another cluster's fixture is still there"
        pods = raylets.Raylets()
        try:
            pods.add("web", 0, pool="web")
            ray.init(pods.address, namespace="gammaray", log_to_driver=False)
            app = Declared(pods, folder, log)
            app.add("a")
            yield app
        finally:
            declared.leave()
            pods.close()


def count(kind: str) -> int:
    return len(raylets.processes(kind))


def free() -> float:
    """GPUs in Ray's books that nobody holds."""
    import ray

    return float(ray.available_resources().get("GPU", 0.0))


def test_it_waits_for_its_pods_and_is_where_the_plan_says(app: Declared) -> None:
    app.deploy()
    eventually(lambda: count(STEWARD) == 1)
    assert not raylets.processes(TARGETS)
    app.add("b")
    eventually(app.ready, STARTING_S)
    assert app.chat(3) == "".join(word(3, i) for i in range(5))
    assert {node for node, _ in app.starts()} == {"a", "b"}
    eventually(lambda: count(WORKERS) == 2)
    assert {(node, what) for node, what, _ in app.seats()} == {
        ("a", "target 0"),
        ("a", "one"),
        ("b", "target 1"),
        ("b", "one"),
    }
    eventually(lambda: free() == HEAD_GPUS)
    assert app.ingress() == {"web"}


def test_a_pod_with_another_name_takes_the_place_of_a_lost_one(app: Declared) -> None:
    """Nothing that was elsewhere starts again, and a steward that is killed meanwhile knows what it did."""
    before, workers = app.starts(), {p.pid for p in raylets.processes(WORKERS)}
    app.pods.kill("b")
    steward = raylets.processes(STEWARD)[0]
    steward.kill()
    app.add("c")
    eventually(lambda: {node for node, _ in app.starts()} == {"a", "b", "c"})
    eventually(app.ready, STARTING_S)
    eventually(lambda: ("c", "target 1") in {(node, what) for node, what, _ in app.seats()})
    after = app.starts()
    assert after.keys() - before.keys() == {("c", ("GPU-4",))}
    assert {key: pid for key, pid in after.items() if key in before} == before
    eventually(lambda: count(WORKERS) == 2)
    assert len(workers & {p.pid for p in raylets.processes(WORKERS)}) == 1
    eventually(lambda: free() == HEAD_GPUS)
    assert app.chat(4) == "".join(word(4, i) for i in range(5))
    # An operator that was restarted declares the same again, and Serve forgets what moved:
    app.deploy()
    eventually(lambda: len(moved()) == 1)
    eventually(app.ready, STARTING_S)
    assert app.chat(4) == "".join(word(4, i) for i in range(5))
    assert {key: pid for key, pid in app.starts().items() if key in before} == before


def moved() -> list[dict[str, Any]]:
    """What Serve knows of it."""
    return deployments.overridden(deployments.applications()["gammaray"])


def test_another_configuration_replaces_it_and_open_requests_end_as_they_should(app: Declared) -> None:
    before, (controller,) = app.starts().items(), raylets.processes(CONTROLLER)
    with ThreadPoolExecutor() as pool:
        held_up = pool.submit(app.chat, 7)
        eventually(lambda: app.log.read_text().splitlines()[-1] == "started")
        app.deploy(server={"max_body_bytes": 1000})
        eventually(lambda: app.starts().items() - before, STARTING_S)  # the other replica is a new one
        app.log.with_name(declared.GO).touch()
        assert held_up.result() == "".join(word(7, i) for i in range(5))
    eventually(app.ready, STARTING_S)
    assert not controller.is_running() and count(CONTROLLER) == 1
    assert app.chat(5) == "".join(word(5, i) for i in range(5))
    assert {(node, what) for node, what, _ in app.seats()} == {
        ("a", "target 0"),
        ("a", "one"),
        ("c", "target 1"),
        ("c", "one"),
    }
    eventually(lambda: free() == HEAD_GPUS)


def test_what_does_not_start_says_why_and_what_ran_has_its_gpus_and_workers_again(app: Declared) -> None:
    """Its replicas compute on those GPUs, so nobody else may be given them."""
    from ray import serve

    before, settings = app.starts(), app.config["server"]
    app.deploy(server={"max_body_bytes": declared.UNFIT})
    eventually(lambda: serve.status().applications["gammaray"].status == "DEPLOY_FAILED", STARTING_S)
    assert "the drafter does not fit" in serve.status().applications["gammaray"].message
    assert (count(CONTROLLER), count(KEEPER), count(WORKERS), free()) == (1, 1, 2, HEAD_GPUS)
    assert app.chat(9) == "".join(word(9, i) for i in range(5))
    app.deploy(server=settings)
    eventually(app.ready, STARTING_S)
    assert app.starts() == before


def test_what_cannot_be_served_says_why_and_changes_nothing(app: Declared) -> None:
    from ray import serve

    app.deploy(target={**app.config["target"], "replicas": 5})
    eventually(lambda: serve.status().applications["gammaray"].status == "DEPLOY_FAILED")
    assert "there is no place for target" in serve.status().applications["gammaray"].message
    assert app.chat(6) == "".join(word(6, i) for i in range(5))
    assert (count(CONTROLLER), count(KEEPER), count(WORKERS)) == (1, 1, 2)
    assert free() == HEAD_GPUS


def test_when_it_is_gone_from_serve_nothing_is_held_and_it_can_come_again(app: Declared) -> None:
    from ray import serve

    serve.delete("gammaray")
    eventually(lambda: not any(map(count, (TARGETS, WORKERS, KEEPER, CONTROLLER))))
    eventually(lambda: free() == HEAD_GPUS + 4)
    app.deploy(target={**app.config["target"], "replicas": 2})
    eventually(app.ready, STARTING_S)
    assert app.chat(8) == "".join(word(8, i) for i in range(5))
    assert (count(STEWARD), count(CONTROLLER), count(KEEPER), free()) == (1, 1, 1, HEAD_GPUS)
    serve.shutdown()  # Serve's controller is another one after that, or none
    eventually(lambda: not any(map(count, (WORKERS, KEEPER, CONTROLLER))))
    eventually(lambda: free() == HEAD_GPUS + 4)
