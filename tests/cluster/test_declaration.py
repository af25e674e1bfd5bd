"""What a RayService may say, and what follows when a node of it is lost: without Ray."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from support.nodes import GB, node

from gammaray.cluster.declaration import declaration
from gammaray.cluster.layout import Layout, layout
from gammaray.cluster.moves import disturbed, homes, overrides, renumbered
from gammaray.cluster.nodes import Node
from gammaray.cluster.placement import plan
from gammaray.cluster.plans import Demand, DraftDemand, TargetDemand
from gammaray.cluster.service import environment
from gammaray.cluster.steward import Lasting
from gammaray.config import Config, parse
from gammaray.errors import ConfigError, GammarayError

CONFIG = {"target": {"model": "m"}, "tenants": {"shop": {}}}


def secret(folder: Path, path: str, key: str) -> None:
    """As kubelet mounts it: links into a folder of this version."""
    mount, _, name = path.rpartition("/")
    version = folder / mount / "..2026_11_30"
    version.mkdir(parents=True, exist_ok=True)
    (version / name).write_text(key)
    (folder / mount / "..data").unlink(missing_ok=True)
    (folder / mount / "..data").symlink_to("..2026_11_30")
    (folder / mount / name).symlink_to(f"..data/{name}")


def test_keys_of_secrets_become_keys_of_tenants_and_operators(tmp_path: Path) -> None:
    secret(tmp_path, "tenants/shop/web", "a-key\n")
    secret(tmp_path, "tenants/shop/app", "another")
    secret(tmp_path, "operator/ops", "third")
    args = {"config": {**CONFIG, "server": {"require_api_key": True}}, "keys": str(tmp_path)}
    config = declaration(args).configured()
    assert [key.name for key in config.tenants["shop"].api_keys] == ["app", "web"]
    assert config.tenants["shop"].api_keys[1].sha256 == hashlib.sha256(b"a-key").hexdigest()
    assert [key.name for key in config.server.operator_keys] == ["ops"]


@pytest.mark.parametrize(
    ("path", "key", "complaint"),
    [
        ("tenants/shpo/web", "a-key", "of a tenant that the configuration does not have"),
        ("tenants/shop/web", " \n", "is empty"),
        ("tenants/shop/my key", "a-key", r"api_keys\[0\]\.name"),
        ("tenants/shop/web", "one-key\nanother", "holds no key"),  # a client could send neither
        ("tenants/shop/web", "x" * 5000, "holds no key"),
        ("tenants/shop/web/deeper", "a-key", "web' cannot be read: Is a directory"),
    ],
)
def test_keys_that_nobody_could_use_are_named(tmp_path: Path, path: str, key: str, complaint: str) -> None:
    secret(tmp_path, path, key)
    with pytest.raises(ConfigError, match=complaint):
        declaration({"config": CONFIG, "keys": str(tmp_path)}).configured()


def test_a_secret_that_is_not_there_is_no_server_without_keys(tmp_path: Path) -> None:
    """Whoever came would be served."""

    def refused(says: str, keys: str = "keys") -> None:
        with pytest.raises(ConfigError, match=says):
            declaration({"config": CONFIG, "keys": str(tmp_path / keys)}).configured()

    refused("is the Secret mounted")
    (tmp_path / "keys/other").mkdir(parents=True)
    refused("has neither 'tenants' nor 'operator'")
    (tmp_path / "keys/tenants").mkdir()
    (tmp_path / "keys/tenants/shop").write_text("a-key")
    refused("shop' cannot be read: Not a directory")
    (tmp_path / "keys/tenants/shop").unlink()
    (tmp_path / "keys/tenants/shop").mkdir()
    refused("shop' is empty")
    with pytest.raises(ConfigError, match=r"args\.keys"):
        declaration({"config": CONFIG, "keys": ""})


def test_keys_for_what_is_no_configuration_are_not_its_fault(tmp_path: Path) -> None:
    secret(tmp_path, "tenants/shop/web", "a-key")
    secret(tmp_path, "operator/ops", "third")
    for more, says in [
        ({"tenants": "shop"}, "config: tenants: expected a mapping"),
        ({"tenants": {"shop": "x"}}, r"config: tenants\.shop: expected a mapping"),
        ({"tenants": {"shop": {"api_keys": 3}}}, r"shop\.api_keys: expected a list"),
        ({"server": 8000}, "config: server: expected a mapping"),
    ]:
        with pytest.raises(ConfigError, match=says):
            declaration({"config": {**CONFIG, **more}, "keys": str(tmp_path)}).configured()


def test_a_wrong_argument_is_named() -> None:
    with pytest.raises(ConfigError, match=r"args\.pool: unknown key; did you mean 'pools'"):
        declaration({"config": CONFIG, "pool": {}})
    with pytest.raises(
        ConfigError, match=r"args\.ingress\.pool: 'wbe' is none of args.pools; did you mean 'web'"
    ):
        declaration({"config": CONFIG, "pools": {"web": 1}, "ingress": {"pool": "wbe"}})
    with pytest.raises(ConfigError, match=r"args\.pools\.web"):
        declaration({"config": CONFIG, "pools": {"web": -1}})
    with pytest.raises(ConfigError, match=r"args\.ingress\.replicas"):
        declaration({"config": CONFIG, "ingress": {"replicas": 0}})
    with pytest.raises(ConfigError, match="target"):
        declaration({"config": {"server": {}}}).configured()


def test_nothing_is_computed_where_the_ingress_is() -> None:
    args = {"config": CONFIG, "pools": {"web": 2, "gpu": 1}, "ingress": {"pool": "web", "replicas": 2}}
    assert declaration(args).computing == ["gpu"]
    assert declaration({**args, "pools": {"web": 2}}).computing == ["web"]  # there is no other


def test_processes_of_ray_are_told_of_traces_only_when_there_are_any() -> None:
    plain = environment(parse(CONFIG, "test"))
    traced = {"otlp_endpoint": "http://collector:4317", "trace_ratio": 0.5}
    more = environment(parse({**CONFIG, "telemetry": traced}, "test"))
    assert plain["GAMMARAY_MAX_BODY_BYTES"] == str(4 * 2**20)
    assert {
        "RAY_SERVE_TRACING_SAMPLING_RATIO": "0.5",
        "GAMMARAY_OTLP_ENDPOINT": "http://collector:4317",
    }.items() <= more.items()
    assert plain.items() < more.items()


def test_only_what_lasts_counts() -> None:
    times = iter((0.0, 9.0, 10.0, 19.0, 20.0))
    lasting = Lasting(10.0, lambda: next(times))
    assert [lasting(so) for so in (True, True, False, True, True, True)] == [False] * 5 + [True]


CONFIGURED = parse(
    {
        "target": {"model": "m", "replicas": 2},
        "drafters": {"d": {"method": "model", "model": "d", "placement": "split"}},
        "tenants": {"t": {"drafter": "d", "pool": {"workers": 2}}},
    },
    "test",
)
DEMAND = Demand(
    TargetDemand("m", 2, 1, 50 * GB, GB),
    (DraftDemand("t", "d", "model", False, GB, GB, "split", workers=2, max_workers=2),),
)


def laid_out(*names: str, config: Config = CONFIGURED, gpus: int = 2) -> tuple[Layout, list[Node]]:
    """Over nodes of two linked GPUs."""
    found = [node(name, gpus, [(0, 1)]) for name in names]
    nodes = [Node(f"id of {name}", name, {"gammaray/node": name}, gpus) for name in names]
    return layout(plan(found, DEMAND), config, list(zip(nodes, found, strict=True))), nodes


def seats(found: Layout) -> set[tuple[str, str]]:
    return {(seat["node"], seat["what"]) for seat in found.outline["seats"]}


@pytest.mark.parametrize("fresh", ["c", "0"])  # behind and before the others, as plans go by names
def test_what_is_on_other_nodes_keeps_its_place_its_number_and_its_name(fresh: str) -> None:
    before, _ = laid_out("a", "b")
    planned, among = laid_out("a", fresh)
    after = renumbered(before, planned)
    assert after.slots[0] == before.slots[0]
    assert {dict(slot.place.labels)["gammaray/node"] for slot in after.slots} == {"a", fresh}
    assert [slot.number for slot in after.slots] == [0, 1]
    names = [{post.name for post in one.posts} for one in (before, after)]
    assert len(names[0] & names[1]) == 1
    assert {post.near for post in after.posts} == {0, 1}
    (told,) = overrides(before, after)
    assert told["name"] == "target-1"
    assert told["ray_actor_options"]["label_selector"] == {"gammaray/node": fresh}
    assert told["ray_actor_options"]["runtime_env"]["env_vars"] == {
        "CUDA_VISIBLE_DEVICES": after.slots[1].place.devices[0]
    }
    assert disturbed(before, after, {"b"}) == {"b", fresh}
    assert seats(after) == {("a", "target 0"), ("a", "d"), (fresh, "target 1"), (fresh, "d")}
    assert homes(after, among) == {"a": "id of a", fresh: f"id of {fresh}"}


def test_a_node_that_came_back_with_its_name_has_its_gpus_leased_again() -> None:
    before, _ = laid_out("a", "b")
    assert overrides(before, renumbered(before, before)) == []
    assert disturbed(before, before, {"b"}) == {"b"}


def test_a_layout_that_the_running_ingress_does_not_know_is_refused() -> None:
    before, _ = laid_out("a", "b")
    without = replace(before, slots=tuple(replace(slot, pools=frozenset()) for slot in before.slots))
    with pytest.raises(GammarayError, match="outside of the target's process"):
        renumbered(before, without)
