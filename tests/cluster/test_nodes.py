"""Nodes of a cluster as Ray lists them, and a plan as it is carried out on them. Without a cluster."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from gammaray.actors.place import Place, Whereabouts, check_place, misplaced, occupy
from gammaray.actors.probe import Answer
from gammaray.cluster import nodes as module
from gammaray.cluster import prepare
from gammaray.cluster.layout import layout
from gammaray.cluster.nodes import Node, missing, nodes, on_this_machine, topologies
from gammaray.cluster.plans import Placed, Plan, Unplaced
from gammaray.cluster.topology import Gpu, Join, Mig, Topology
from gammaray.config import Config, load, parse
from gammaray.errors import ConfigError

CPU = {"CPU": 4.0}


def listed(id: str, host: str = "h", resources: dict[str, float] = CPU, **labels: str) -> dict[str, Any]:
    own = {f"gammaray/{key}": value for key, value in labels.items()}
    return {
        "NodeID": id * 16,
        "Alive": True,
        "NodeManagerHostname": host,
        "NodeManagerAddress": "127.0.0.1",
        "Resources": resources,
        "Labels": {"ray.io/node-id": id * 16, "other": "x", **own},
    }


def known(monkeypatch: pytest.MonkeyPatch, *found: dict[str, Any]) -> list[tuple[str, dict[str, str]]]:
    monkeypatch.setattr(ray, "nodes", lambda: list(found))
    return [(node.name, dict(node.labels)) for node in nodes()]


def test_nodes_are_named_by_label_or_host(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = listed("4", "gone") | {"Alive": False}
    head = listed("5", "head", {"object_store_memory": 1.0})  # no CPU: no replica can be there
    found = known(monkeypatch, listed("2", "two"), listed("1", node="one"), dead, head)
    assert found == [("one", {"gammaray/node": "one"}), ("two", {"ray.io/node-id": "2" * 16})]


def test_an_island_is_a_node_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = known(monkeypatch, listed("1", node="n", island="0"), listed("2", node="n", island="1"))
    assert found == [
        ("n/0", {"gammaray/node": "n", "gammaray/island": "0"}),
        ("n/1", {"gammaray/node": "n", "gammaray/island": "1"}),
    ]


@pytest.mark.parametrize("labels", [{}, {"node": "n"}])
def test_nodes_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch, labels: dict[str, str]) -> None:
    found = known(monkeypatch, listed("1", "n", **labels), listed("2", "n", **labels))
    assert found == [
        ("n-11111111", {"ray.io/node-id": "1" * 16}),
        ("n-22222222", {"ray.io/node-id": "2" * 16}),
    ]


def test_a_cluster_is_this_machine_when_no_node_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = listed("1"), listed("2") | {"NodeManagerAddress": "192.0.2.7"}
    for found, expected in (([here], True), ([here, there], False), ([here, there | {"Alive": False}], True)):
        monkeypatch.setattr(ray, "nodes", lambda found=found: found)
        assert on_this_machine() is expected


PAIR = Topology("host", (Gpu(0, "GPU-a", "x"), Gpu(1, "GPU-b", "x")), {(0, 1): Join(4)})
ONE, TWO, SICK = (Node(id, f"node {id}", {"ray.io/node-id": id}, 0) for id in "123")


def test_topologies_have_the_names_of_their_nodes_and_what_their_raylets_have(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = {
        "1": Answer(PAIR, {}),
        "2": Answer(PAIR, {"CUDA_VISIBLE_DEVICES": "1"}),
        "3": TimeoutError("no answer in time"),
    }
    monkeypatch.setattr(module, "ask", lambda probe, among, timeout: {id: answers[id] for id in among})
    (one, whole), (two, half) = topologies(lambda: PAIR, [ONE, TWO, SICK])
    assert (one, two) == (ONE, TWO)
    assert (whole.node, whole.gpus, whole.joins) == ("node 1", PAIR.gpus, PAIR.joins)
    assert (half.node, half.gpus, half.joins) == ("node 2", PAIR.gpus[1:], {})
    assert "node 3 is left out" in caplog.text


def test_a_node_whose_gpus_torch_cannot_use_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a pool of GPUs whose image has torch for CPUs, on which a large model would crawl."""
    monkeypatch.setattr(prepare, "_nvml", lambda: PAIR)
    monkeypatch.setattr(prepare, "_cuda", lambda: True)
    assert prepare.usable() == PAIR
    monkeypatch.setattr(prepare, "_cuda", lambda: False)
    with pytest.raises(ConfigError, match="does its image have the CUDA build") as found:
        prepare.usable()
    monkeypatch.setattr(module, "ask", lambda probe, among, timeout: {"1": found.value})
    with pytest.raises(ConfigError, match="node node 1: torch cannot use CUDA on its 2 GPUs"):
        topologies(prepare.usable, [ONE])


def test_pools_are_told_apart_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = listed("4", pool="gpu") | {"Alive": False}
    found = [
        listed("1", node="a", pool="gpu"),
        listed("2", node="b", pool="web"),
        listed("3", node="c"),
        dead,
    ]
    monkeypatch.setattr(ray, "nodes", lambda: found)
    assert [node.name for node in nodes(["gpu"])] == ["a"]
    assert [node.name for node in nodes()] == ["a", "b", "c"]
    assert missing({"gpu": 2, "web": 1, "other": 1}) == {"gpu": 1, "other": 1}


def test_a_device_is_one_replicas_until_its_process_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a new replica that loads beside the old one, which still has the memory."""
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "1"))
    held = occupy(["GPU-1", "GPU-0"], tmp_path)
    with ThreadPoolExecutor() as pool:
        next_one = pool.submit(occupy, ["GPU-1"], tmp_path)
        assert occupy(["GPU-2"], tmp_path)
        assert not wait([next_one], timeout=0.2).done
        for file in held:
            os.close(file)  # as when the process ends
        assert next_one.result(timeout=30)


@pytest.fixture
def config() -> Config:
    model = {"method": "model", "model": "small"}
    return parse(
        {
            "target": {"model": "big", "replicas": 2, "tensor_parallel": 2},
            "drafters": {"near": model, "own": model, "list": {"method": "ngram"}},
            "tenants": {"a": {"drafter": "near"}, "b": {"drafter": "own"}, "c": {"drafter": "list"}},
        },
        "test",
    )


def uuids(*gpus: int) -> tuple[str, ...]:
    return tuple(f"GPU-{gpu}" for gpu in gpus)


def target(replica: int, node: str, *gpus: int) -> Placed:
    return Placed("target", node, gpus, "split", "", replica, uuids=uuids(*gpus), memory_fraction=0.9)


def draft(mode: Any, tenant: str, drafter: str, replica: int, node: str, *gpus: int) -> Placed:
    own = {"uuids": uuids(*gpus), "memory_fraction": 0.3}
    return Placed("draft", node, gpus, mode, "", replica, tenant, drafter, **own)


def test_a_plan_becomes_slots_posts_and_gpus_to_hold(config: Config) -> None:
    gpus = tuple(Gpu(i, f"GPU-{i}", "x") for i in range(4))
    found = [(node, Topology(node.name, gpus)) for node in (ONE, TWO)]
    placements = (
        replace(target(1, "node 2", 0, 1), memory_fraction=0.5),
        target(0, "node 1", 2, 3),
        draft("split", "a", "near", 0, "node 1", 1),
        draft("split", "b", "own", 0, "node 1", 1),
        draft("same-gpu", "b", "own", 1, "node 2", 0),
        draft("in-process", "c", "list", 0, "node 1"),
    )
    made = layout(Plan(placements), config, found)
    first, second = made.slots
    assert first.place == Place(ONE.labels, uuids(2), 0.9, sharers=4)  # with two ranks and two draft workers
    assert first.fellows == (Place(ONE.labels, uuids(3), 0.9, sharers=4),)
    shared = pytest.approx(0.5 + 0.3)  # also of the drafter in its process
    assert second.place == Place(TWO.labels, uuids(0), shared, sharers=2)
    assert second.fellows == (Place(TWO.labels, uuids(1), 0.5, sharers=2),)
    assert (first.number, second.number) == (0, 1)
    assert first.pools == {("a", "near"), ("b", "own")}
    assert second.pools == {("a", "near")}  # the other drafter is in its own process
    assert [(post.tenant, post.drafter, post.near, post.place.devices) for post in made.posts] == [
        ("a", "near", 0, uuids(1)),
        ("b", "own", 0, uuids(1)),
    ]
    held = {name: [sorted(names) for names in gpus] for name, gpus in made.gpus.items()}
    assert held == {
        "node 1": [["1", "GPU-1"], ["2", "GPU-2"], ["3", "GPU-3"]],
        "node 2": [["0", "GPU-0"], ["1", "GPU-1"]],
    }


def test_a_part_of_a_gpu_is_held_by_the_whole(config: Config) -> None:
    gpu = Gpu(5, "GPU-5", "x", mig=(Mig("MIG-1", 1), Mig("MIG-2", 1)))
    placed = Placed("target", "node 1", (5,), "in-process", "", 0, uuids=("MIG-2",), memory_fraction=0.5)
    made = layout(Plan((placed,)), config, [(ONE, Topology("node 1", (gpu,)))])
    assert made.slots[0].place.devices == ("MIG-2",)
    assert dict(made.gpus) == {"node 1": (frozenset({"5", "GPU-5"}),)}


def test_a_version_changes_with_what_is_configured() -> None:
    def version(**settings: object) -> str:
        drafter = {"method": "model", "model": "small", "placement": "split", **settings}
        tenants = {"a": {"drafter": "d"}}
        config = parse({"target": {"model": "big"}, "drafters": {"d": drafter}, "tenants": tenants}, "test")
        plan = Plan((target(0, "node 1"), draft("split", "a", "d", 0, "node 1")))
        return layout(plan, config, [(ONE, Topology("node 1", ()))]).posts[0].version

    assert version() == version()
    assert len({version(), version(model="other"), version(version="2")}) == 3
    assert version(version="2").startswith("2-")


def test_what_has_no_place_is_told(config: Config) -> None:
    plan = Plan((), (Unplaced("replica 0", "no GPU has room", "a GPU of 90 GB"),))
    with pytest.raises(ConfigError, match="no place for replica 0: no GPU has room; a GPU of 90 GB"):
        layout(plan, config, [])


def test_the_default_is_not_planned() -> None:
    assert prepare.nothing_to_decide(load())
    for change in ({"replicas": 2}, {"tensor_parallel": 2}):
        assert not prepare.nothing_to_decide(parse({"target": {"model": "x", **change}}, "test"))


def test_a_drafter_counts_only_where_a_tenant_uses_it() -> None:
    split = {"method": "model", "model": "small", "placement": "split"}
    plain = {"target": {"model": "x"}, "drafters": {"d": split}}
    assert prepare.nothing_to_decide(parse(plain, "test"))
    assert not prepare.nothing_to_decide(parse({**plain, "tenants": {"a": {"drafter": "d"}}}, "test"))


NODE = {"gammaray/node": "a"}


@pytest.mark.parametrize(
    ("labels", "devices", "says"),
    [
        (NODE, ("GPU-1", "GPU-0"), None),
        ({**NODE, "other": "x"}, ("GPU-1", "GPU-0"), None),
        (NODE, ("GPU-0", "GPU-1"), "it sees the devices GPU-0, GPU-1 instead of GPU-1, GPU-0"),
        (NODE, (), "it sees the devices none instead of GPU-1, GPU-0"),
        ({"gammaray/node": "b"}, ("GPU-1", "GPU-0"), "it runs on node n (gammaray/node=b), not on a"),
    ],
)
def test_an_actor_in_the_wrong_place_is_noticed(
    labels: dict[str, str], devices: tuple[str, ...], says: str | None
) -> None:
    assert misplaced(Place(NODE, ("GPU-1", "GPU-0")), Whereabouts("n", labels, devices)) == says


def test_without_devices_every_node_will_do() -> None:
    assert misplaced(Place(NODE), Whereabouts("n", {"gammaray/node": "b"}, ("0",))) is None
    check_place(Place(NODE))  # asks nobody: this process is in no cluster
    assert Place(NODE).options()["fallback_strategy"] == [{"label_selector": {}}]
    assert "fallback_strategy" not in Place(NODE).options(strict=True)
    assert "fallback_strategy" not in Place(NODE, ("0",)).options()
    assert Place().options() == {"num_gpus": 0}


def test_gpus_are_planned_for_where_torch_can_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a GPU that only NVML sees, which no engine could compute on, and one that is left alone."""
    gpus = Topology("node 1", (Gpu(0, "GPU-a", "Test GPU", 2**36),))
    planned: list[Topology] = []
    said: list[str] = []
    monkeypatch.setattr(prepare, "on_this_machine", lambda: True)
    monkeypatch.setattr(prepare, "nodes", lambda pools: [ONE])
    monkeypatch.setattr(prepare, "topologies", lambda probe, among: [(ONE, probe())])
    monkeypatch.setattr(prepare, "_nvml", lambda: gpus)
    monkeypatch.setattr(prepare, "demand", lambda config, sizes: sizes)
    monkeypatch.setattr(prepare, "plan", lambda found, asked: planned.extend(found))
    monkeypatch.setattr(prepare, "layout", lambda made, config, found: prepare.DEFAULT)
    monkeypatch.setattr(prepare, "_cuda", lambda: False)
    assert prepare.prepare(load(), None, said.append) == (prepare.DEFAULT, ())
    two = parse({"target": {"model": "x", "replicas": 2}}, "test")
    prepare.prepare(two, None, said.append)
    assert [node.gpus for node in planned] == [()]
    assert said == ["node node 1 has 1 GPU: torch cannot use CUDA here, so its GPUs are not used"] * 2
    monkeypatch.setattr(prepare, "_cuda", lambda: True)
    prepare.prepare(load(), None, said.append)
    assert planned[1:] == [gpus] and len(said) == 2
