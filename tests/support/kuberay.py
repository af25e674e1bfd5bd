"""What KubeRay's operator does with a RayService, and what it refuses that its CRD lets through.

The rules are those of its validation at 1.7.0, read and not run: no operator is to be had without a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from support.manifests import groups

Object = dict[str, Any]
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
STRATEGIES = {"NewCluster", "NewClusterWithIncrementalUpgrade", "None"}
GATED = {"networkPolicy": "RayClusterNetworkPolicy", "tlsOptions": "RayClusterMTLS"}
GATED |= {"historyServerOptions": "RayClusterHistoryServer"}
OWN_ENV = {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME", "RAY_enable_autoscaler_v2"}
COUNTED = {"num-cpus", "num-gpus", "memory", "resources"}


def refusals(service: Object, gates: frozenset[str] = frozenset()) -> list[str]:
    """Why a default operator would leave it alone; `gates` are the feature gates that are on besides."""
    cluster = service["spec"]["rayClusterConfig"]
    return [
        *_names(service, cluster),
        *_upgrade(service["spec"], cluster),
        *_autoscaling(cluster),
        *_authentication(cluster),
        *_storage(cluster, gates),
        *(reason for name, group in groups(cluster) for reason in _group(name, group, cluster)),
        *(f"{field} needs {gate}" for field, gate in GATED.items() if field in cluster and gate not in gates),
    ]


def labels_of_pods(service: Object) -> dict[str, Object]:
    """The labels that the pods of each group will bear: the template's, the group's, the operator's own."""
    found = {}
    for name, group in groups(service["spec"]["rayClusterConfig"]):
        role = "head" if name == "head" else "worker"
        own = {"ray.io/is-ray-node": "yes", "app.kubernetes.io/name": "kuberay"}
        own |= group["template"].get("metadata", {}).get("labels", {}) | group.get("labels", {})
        cluster = f"{service['metadata']['name']}-abcde"  # five characters are added by chance
        own |= {
            "ray.io/node-type": role,
            "ray.io/cluster": cluster,
            "ray.io/group": name if role == "worker" else "headgroup",
        }
        found[name] = own
    return found


def _names(service: Object, cluster: Object) -> Iterator[str]:
    name = service["metadata"]["name"]
    if len(name) > 47 or not NAME.fullmatch(name):
        yield f"name {name}"
    timeout = service["metadata"].get("annotations", {}).get("ray.io/initializing-timeout", "1s")
    if not re.fullmatch(r"[1-9]\d*|([1-9]\d*(h|m|s))+", timeout):
        yield f"ray.io/initializing-timeout {timeout}"
    if "upgradeStrategy" in cluster:
        yield "upgradeStrategy of the RayCluster"
    if cluster["headGroupSpec"].get("headService", {}).get("metadata", {}).get("name"):
        yield "name of the head's Service"


def _upgrade(spec: Object, cluster: Object) -> Iterator[str]:
    strategy = spec.get("upgradeStrategy", {})
    kind = strategy.get("type", "NewCluster")
    if kind not in STRATEGIES:
        yield f"upgradeStrategy {kind}"
    if kind != "NewClusterWithIncrementalUpgrade":
        return
    options = strategy.get("clusterUpgradeOptions", {})
    if not cluster.get("enableInTreeAutoscaling"):
        yield "incremental upgrade without autoscaling"
    if not options.get("gatewayClassName"):
        yield "incremental upgrade without gatewayClassName"
    if not 0 <= options.get("stepSizePercent", -1) <= options.get("maxSurgePercent", 100) <= 100:
        yield "stepSizePercent above maxSurgePercent"
    if options.get("intervalSeconds", 0) <= 0:
        yield "intervalSeconds"


def _autoscaling(cluster: Object) -> Iterator[str]:
    if not cluster.get("enableInTreeAutoscaling"):
        yield from ("autoscalerOptions without autoscaling",) if "autoscalerOptions" in cluster else ()
        return
    options = cluster.get("autoscalerOptions", {})
    if options.get("version") != "v2":
        yield "autoscaler other than v2"
    if options.get("idleTimeoutSeconds", 0) < 0:
        yield "idleTimeoutSeconds"
    for name, group in groups(cluster):
        if group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield f"restartPolicy of {name}"
        if group.get("suspend"):
            yield f"{name} suspended"


def _authentication(cluster: Object) -> Iterator[str]:
    options = cluster.get("authOptions", {})
    if options.get("enableK8sTokenAuth"):
        yield "enableK8sTokenAuth"
    version = tuple(map(int, cluster.get("rayVersion", "0.0").split(".")[:2]))
    if options.get("mode") == "token" and version < (2, 52):
        yield f"token with Ray {cluster.get('rayVersion')}"


def _storage(cluster: Object, gates: frozenset[str]) -> Iterator[str]:
    options = cluster.get("gcsFaultToleranceOptions", {})
    redis = {"redisAddress", "redisUsername", "redisPassword", "externalStorageNamespace"} & options.keys()
    if options.get("backend") == "rocksdb":
        if "GCSFaultToleranceEmbeddedStorage" not in gates:
            yield "rocksdb needs GCSFaultToleranceEmbeddedStorage"
        if redis:
            yield f"rocksdb with {sorted(redis)}"
        storage = options.get("storage", {})
        if storage.get("claimName") and storage.keys() - {"claimName"}:
            yield "storage of a claim that exists"
    elif "storage" in options:
        yield "redis with storage"
    if {"redis-password", "redis-username"} & cluster["headGroupSpec"]["rayStartParams"].keys():
        yield "Redis' password in rayStartParams"


def _group(name: str, group: Object, cluster: Object) -> Iterator[str]:
    parameters, labels = group.get("rayStartParams", {}), group.get("labels", {})
    if group.get("resources") and COUNTED & parameters.keys():
        yield f"{name}: resources twice"
    if "labels" in parameters:
        yield f"{name}: labels in rayStartParams"
    if not all(
        LABEL.fullmatch(part) for pair in labels.items() for part in (pair[0].split("/")[-1], pair[1])
    ):
        yield f"{name}: labels {labels}"
    own = OWN_ENV & {entry["name"] for entry in group["template"]["spec"]["containers"][0].get("env", [])}
    if own:
        yield f"{name}: {sorted(own)} are the operator's"
    if name == "head":
        return
    least, most = group.get("minReplicas"), group.get("maxReplicas")
    if least is None or most is None or not 0 <= least <= group.get("replicas", least) <= most:
        yield f"{name}: replicas"
    v2 = (
        cluster.get("enableInTreeAutoscaling") and cluster.get("autoscalerOptions", {}).get("version") == "v2"
    )
    if (group.get("idleTimeoutSeconds") is not None or group.get("priority")) and not v2:
        yield f"{name}: idleTimeoutSeconds or priority without autoscaler v2"
