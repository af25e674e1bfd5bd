"""What stands in the pods: what Ray, the product and the restricted profile of Kubernetes ask of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import manifests
from support.charts import EVERY, arguments, configured, each_file, mounts, objects, pools, service
from support.helm import CHART

from gammaray.cluster.service import environment

Object = dict[str, Any]
TWO = CHART / "ci" / "two-pools-values.yaml"


def container(group: Object) -> Object:
    (found,) = group["template"]["spec"]["containers"]
    return dict(found)


def variables(group: Object) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container(group)["env"]}


def all_pods(file: Path) -> Iterator[Object]:
    """The Ray cluster's and the chart's own."""
    yield from manifests.pods(service(file))
    yield from (found for found in objects("4", file) if found["kind"] == "Pod")


@each_file
def test_every_ray_process_has_the_variables_of_the_product(file: Path, tmp_path: Path) -> None:
    """One that Serve reads at import: on the head alone it would not reach the proxies of other nodes."""
    wanted = environment(configured(file, tmp_path))
    for name, group in pools(file).items():
        found = variables(group)
        assert {key: found.get(key) for key in wanted} == wanted, name
        assert len(container(group)["env"]) == len(found), f"{name}: a variable twice"


@each_file
def test_workers_start_by_their_labels(file: Path) -> None:
    """A pool that gammaray waits for, and whose pods bear another name or none."""
    groups = dict(pools(file))
    assert groups.pop("head")["rayStartParams"]["num-cpus"] == "0"
    asked = arguments(file)
    assert {name: group["minReplicas"] for name, group in groups.items()} == asked["pools"]
    assert asked["ingress"]["pool"] in {None, *groups}
    for name, group in groups.items():
        assert group["labels"] == {"gammaray/pool": name} and variables(group)["GAMMARAY_POOL"] == name
        assert variables(group)["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
        assert container(group)["command"] == ["python", "-m", "gammaray.cluster.pod"]
        assert group["template"]["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"


@each_file
def test_ray_counts_the_gpus_that_the_pod_asks_for(file: Path) -> None:
    """More than the pod has: replicas that never start. Fewer: GPUs that nobody uses."""
    for name, group in pools(file).items():
        limits = container(group)["resources"]["limits"]
        assert int(group["rayStartParams"].get("num-gpus", 0)) == int(limits.get("nvidia.com/gpu", 0)), name
        image = container(group)["image"]
        assert ("-cuda" in image) == ("nvidia.com/gpu" in limits), f"{name}: {image}"


@each_file
def test_pods_are_of_the_restricted_profile(file: Path) -> None:
    """A namespace that enforces it makes none of the others, and says so to the operator alone."""
    kinds = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
    for pod in all_pods(file):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert {kind for volume in spec.get("volumes", []) for kind in volume} <= kinds | {"name"}
        for each in spec["containers"]:
            assert each["securityContext"]["allowPrivilegeEscalation"] is False
            assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@each_file
def test_only_the_autoscaler_has_a_token_of_the_cluster(file: Path) -> None:
    """With one in every pod, whoever gets into a replica may change pods and Ray clusters."""
    autoscaled = service(file)["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"]
    for name, group in pools(file).items():
        token = group["template"]["spec"]["automountServiceAccountToken"]
        assert token == (autoscaled and name == "head"), name


@each_file
def test_mounts_have_volumes_and_claims_are_claimed(file: Path) -> None:
    for pod in all_pods(file):
        spec = pod["spec"]
        used = mounts(pod)
        assert len(used) == len(spec["containers"][0].get("volumeMounts", []))
        assert {one["name"] for one in used.values()} == {one["name"] for one in spec.get("volumes", [])}
        claims = {claim["name"] for claim in spec["containers"][0]["resources"].get("claims", [])}
        assert claims == {claim["name"] for claim in spec.get("resourceClaims", [])}


def test_keys_come_from_secrets_where_the_product_looks() -> None:
    """A key in an object that everyone of the namespace reads, or in a folder where nobody looks."""
    assert arguments(TWO)["keys"] == "/etc/gammaray/keys"
    places = mounts(pools(TWO)["head"]["template"]).items()
    secrets = {path: volume["secret"]["secretName"] for path, volume in places if "secret" in volume}
    below = {path.removeprefix("/etc/gammaray/keys/"): name for path, name in secrets.items()}
    assert below == {"tenants/chat": "chat-keys", "tenants/code": "code-keys", "operator": "operator-keys"}
    assert arguments(CHART / "ci" / "cpu-demo-values.yaml")["keys"] is None
    assert not [found for file in (TWO, EVERY) for found in objects("4", file) if found["kind"] == "Secret"]


@each_file
def test_a_slow_start_is_waited_for(file: Path) -> None:
    """A liveness probe that kills a pod which still loads, an operator that gives up for good."""
    for name, group in pools(file).items():
        probes = container(group)
        startup = probes["startupProbe"]
        assert startup["failureThreshold"] * startup["periodSeconds"] >= 120, name
        ports = {port["name"] for port in probes["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            port = probes[probe]["httpGet"]["port"]
            assert isinstance(port, int) or port in ports, f"{name}: {probe}"
    assert "ray.io/initializing-timeout" not in service(file)["metadata"].get("annotations", {})


@each_file
def test_ports_are_those_of_the_configuration(file: Path, tmp_path: Path) -> None:
    """A port that is declared by its default, while the process listens at another."""
    config = configured(file, tmp_path)
    assert config.server.host == "0.0.0.0"
    for group in pools(file).values():
        ports = {port["name"]: port["containerPort"] for port in container(group)["ports"]}
        assert ports["gammaray"] == config.telemetry.prometheus_port
        assert ports.get("serve", ports.get("proxy")) == config.server.port


@pytest.mark.parametrize("name", ["h100", "ingress", "head"])
def test_options_reach_the_pod_that_they_are_of(name: str) -> None:
    """An option of one pool in all of them, or in none."""
    spec = pools(EVERY)[name]["template"]["spec"]
    assert spec["nodeSelector"]["disk"] == "fast" and spec["priorityClassName"] == "serving"
    assert ("nvidia.com/gpu.product" in spec["nodeSelector"]) == (name == "h100")
    assert spec["tolerations"] == [{"key": "only", "operator": "Exists"}]
    shm = next(volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm")
    assert shm == {"medium": "Memory", "sizeLimit": "8Gi" if name == "h100" else "1Gi"}
