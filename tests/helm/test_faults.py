"""The checks themselves: each fault that a chart could have is seen when it is planted."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from support import kuberay, manifests
from support.helm import CHART, rendered

Object = dict[str, Any]
UPGRADE = CHART / "ci" / "upgrade-values.yaml"
REDIS = ("spec", "rayClusterConfig", "gcsFaultToleranceOptions")
CLUSTER = ("spec", "rayClusterConfig")
HEAD = (*CLUSTER, "headGroupSpec")
WORKERS = (*CLUSTER, "workerGroupSpecs", 0)
OPTIONS = ("spec", "upgradeStrategy", "clusterUpgradeOptions")


@pytest.fixture(scope="module")
def service() -> Object:
    """With autoscaling, fault tolerance and an incremental upgrade."""
    return next(found for found in rendered("4", "--values", UPGRADE) if found["kind"] == "RayService")


def planted(service: Object, path: tuple[str | int, ...], value: Any) -> Object:
    """With that field; None takes it away."""
    result = deepcopy(service)
    place: Any = result
    for name in path[:-1]:
        place = place.setdefault(name, {}) if isinstance(place, dict) else place[name]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return result


@pytest.mark.parametrize(
    ("path", "value", "seen"),
    [
        (("metadata", "name"), "a" * 48, "name"),
        (("metadata", "name"), "1st", "name"),
        (("metadata", "annotations", "ray.io/initializing-timeout"), "soon", "initializing-timeout"),
        (("spec", "upgradeStrategy", "type"), "Rolling", "upgradeStrategy Rolling"),
        ((*OPTIONS, "gatewayClassName"), None, "gatewayClassName"),
        ((*OPTIONS, "stepSizePercent"), 60, "stepSizePercent"),
        ((*OPTIONS, "intervalSeconds"), 0, "intervalSeconds"),
        ((*CLUSTER, "enableInTreeAutoscaling"), False, "without autoscaling"),
        ((*CLUSTER, "autoscalerOptions", "version"), "v1", "other than v2"),
        ((*CLUSTER, "upgradeStrategy"), {"type": "Recreate"}, "upgradeStrategy of the RayCluster"),
        ((*CLUSTER, "networkPolicy"), {"mode": "DenyAll"}, "needs RayClusterNetworkPolicy"),
        ((*CLUSTER, "authOptions", "enableK8sTokenAuth"), True, "enableK8sTokenAuth"),
        ((*CLUSTER, "rayVersion"), "2.51.0", "token with Ray 2.51.0"),
        ((*REDIS, "backend"), "rocksdb", "needs GCSFaultToleranceEmbeddedStorage"),
        ((*REDIS, "storage"), {"size": "1Gi"}, "redis with storage"),
        ((*HEAD, "rayStartParams", "redis-password"), "secret", "in rayStartParams"),
        ((*HEAD, "resources"), {"CPU": "1"}, "resources twice"),
        ((*HEAD, "headService"), {"metadata": {"name": "mine"}}, "head's Service"),
        ((*HEAD, "template", "spec", "restartPolicy"), "Always", "restartPolicy of head"),
        ((*WORKERS, "rayStartParams", "labels"), "a=b", "labels in rayStartParams"),
        ((*WORKERS, "labels"), {"gammaray/pool": "a b"}, "labels"),
        ((*WORKERS, "minReplicas"), 9, "replicas"),
        ((*WORKERS, "template", "spec", "containers", 0, "env"), [{"name": "REDIS_PASSWORD"}], "operator's"),
    ],
)
def test_what_only_the_operator_refuses_is_seen(
    service: Object, path: tuple[str | int, ...], value: Any, seen: str
) -> None:
    assert kuberay.refusals(service) == []
    assert seen in "; ".join(kuberay.refusals(planted(service, path, value)))


@pytest.mark.parametrize(
    ("path", "value", "seen"),
    [
        ((*CLUSTER, "suspendd"), True, "'suspendd' was unexpected"),
        ((*WORKERS, "groupName"), None, "'groupName' is a required property"),
        ((*WORKERS, "replicas"), "2", "is not of type 'integer'"),
        ((*HEAD, "rayStartParams", "num-cpus"), 0, "is not of type 'string'"),
        ((*HEAD, "template", "spec", "nodeSelectors"), {}, "'nodeSelectors' was unexpected"),
        (("metadata", "labels", "a"), 1, "is not of type 'string'"),
    ],
)
def test_what_a_crd_refuses_is_seen(
    service: Object, path: tuple[str | int, ...], value: Any, seen: str
) -> None:
    manifests.needs_crds()
    assert manifests.problems(service) == []
    assert seen in "; ".join(manifests.problems(planted(service, path, value)))


def test_what_only_a_pod_shows_is_seen(service: Object) -> None:
    """The CRD has no schema of what it does not know: a quantity is any text there."""
    probe = (*WORKERS, "template", "spec", "containers", 0, "livenessProbe")
    pods = list(manifests.pods(planted(service, probe, {"httpGett": {}})))
    assert "'httpGett' was unexpected" in "; ".join(manifests.problems(pods[1]))


MISSPELT: list[tuple[Object, str]] = [
    ({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "spec": {"selektor": {}}}, "selektor"),
    ({"apiVersion": "policy/v1beta1", "kind": "PodDisruptionBudget", "spec": {}}, "Couldn't find schema"),
    ({"apiVersion": "v1", "kind": "Sevice", "spec": {}}, "Couldn't find schema"),
    (
        {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "spec": {"endpoints": []}},
        "endpoints",
    ),
    ({"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "spec": {"rules": []}}, "rules"),
    (
        {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute", "spec": {"rules": []}},
        "parentRefs",
    ),
]


@pytest.mark.parametrize(("wrong", "seen"), MISSPELT)
def test_what_other_kinds_do_not_have_is_seen(wrong: Object, seen: str) -> None:
    assert seen in "; ".join(manifests.problems(wrong | {"metadata": {"name": "a"}}))
