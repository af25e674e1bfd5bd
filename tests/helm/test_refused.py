"""Bad values stop with a sentence that says what to change, and every such sentence can be reached."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.helm import CHART, VERSIONS, refused, with_values

Values = dict[str, Any]
INCREMENTAL = {"strategy": "NewClusterWithIncrementalUpgrade", "gatewayClassName": "istio"}
ON, OFF = {"enabled": True}, {"enabled": False}
METRICS = {"server": {"protect_metrics": True}}
OPERATOR = {"operator": {"existingSecret": "operator-keys"}}
ROUTE = {"enabled": True, "parentRefs": [{"name": "public"}]}

CASES: dict[str, Values] = {
    "has 48 characters": {"fullnameOverride": "a" * 48},
    "must begin with a letter": {"fullnameOverride": "1st"},
    "pools.head: give it another name": {"pools": {"head": {}}},
    "pools.H100: give it another name": {"pools": {"H100": {"gpus": 8}}},
    "replicas (1) must lie between": {
        "pools": {"main": {"minReplicas": 2, "maxReplicas": 3}},
        "autoscaling": ON,
    },
    "so something must choose": {"pools": {"main": {"maxReplicas": 2}}},
    "nothing brings its GPUs": {"pools": {"main": {"gpus": 1, "gpuResource": ""}}},
    "there is no pod for the model": {"pools": {"main": {"replicas": 0}}},
    "config.target.tensor_parallel is 2, and works on CPUs only": {
        "config": {"target": {"tensor_parallel": 2}},
        "pools": {"main": {"gpus": 2}},
    },
    "ingressPool.replicas must be at least 1": {"ingressPool": {"enabled": True, "replicas": 0}},
    "pools.main.extraEnv: GAMMARAY_POOL": {"pools": {"main": {"extraEnv": [{"name": "GAMMARAY_POOL"}]}}},
    "pools.main.podLabels: by app.kubernetes.io/instance": {
        "pools": {"main": {"podLabels": {"app.kubernetes.io/instance": "mine"}}}
    },
    "head.extraVolumes: the chart has a volume shm": {
        "head": {"extraVolumes": [{"name": "shm", "emptyDir": {}}]}
    },
    "config.server.port is 8080": {"config": {"server": {"port": 8080}}},
    "prometheus_port is 8000": {"config": {"telemetry": {"prometheus_port": 8000}}},
    "so that Prometheus would see Ray alone": {
        "config": {"telemetry": {"prometheus_port": 0}},
        "monitoring": {"podMonitor": ON},
    },
    "tenants.support.drafter: config.drafters has no smal, but lookup": {
        "config": {"tenants": {"support": {"drafter": "smal"}}}
    },
    "keys.tenants.chat: config.tenants has no such": {"keys": {"tenants": {"chat": {"existingSecret": "a"}}}},
    "its keys lie in a folder": {
        "config": {"tenants": {"a b": {}}},
        "keys": {"tenants": {"a b": {"existingSecret": "a"}}},
    },
    "and no '.' first": {
        "config": {"tenants": {"..": {}}},
        "keys": {"tenants": {"..": {"existingSecret": "a"}}},
    },
    "pools.main.resources: ask for nvidia.com/gpu": {"pools": {"main": {"resources": {"nvidia.com/gpu": 1}}}},
    "set existingSecret to the name": {"keys": {"tenants": {"default": {}}}},
    "no tenant has a key": {"config": {"server": {"require_api_key": True}}, "tests": OFF},
    "there is no operator key to read them": {"config": METRICS},
    "terminationGracePeriodSeconds must be at least 930": {"config": {"server": {"request_timeout_s": 900}}},
    "auth.enabled needs Ray 2.52": {"rayVersion": "2.51.0"},
    "Kueue takes no service with Ray's autoscaler": {"kueue": {"queueName": "a"}, "autoscaling": ON},
    "Kueue takes 7 groups": {"kueue": {"queueName": "a"}, "pools": {f"p{i}": {} for i in range(7)}},
    'gcsFaultTolerance.backend is "etcd"': {"gcsFaultTolerance": {"enabled": True, "backend": "etcd"}},
    "set gcsFaultTolerance.redisAddress": {"gcsFaultTolerance": ON},
    "which has no address and no password": {
        "gcsFaultTolerance": {"enabled": True, "backend": "rocksdb", "redisAddress": "redis:6379"}
    },
    'upgrade.strategy is "Rolling"': {"upgrade": {"strategy": "Rolling"}},
    'upgrade.configChange is "never"': {"upgrade": {"configChange": "never"}},
    "upgrade.configChange new-cluster needs an upgrade": {
        "upgrade": {"configChange": "new-cluster", "strategy": "None"}
    },
    "needs Ray's autoscaler": {"upgrade": INCREMENTAL},
    "set upgrade.gatewayClassName": {"upgrade": INCREMENTAL | {"gatewayClassName": ""}, "autoscaling": ON},
    "must not exceed upgrade.maxSurgePercent": {
        "upgrade": INCREMENTAL | {"stepSizePercent": 60, "maxSurgePercent": 50},
        "autoscaling": ON,
    },
    "upgrade.intervalSeconds must be at least": {
        "upgrade": INCREMENTAL | {"intervalSeconds": 0},
        "autoscaling": ON,
    },
    "httpRoute.enabled does not go with": {"upgrade": INCREMENTAL, "autoscaling": ON, "httpRoute": ROUTE},
    "httpRoute.enabled needs httpRoute.parentRefs": {"httpRoute": ON},
    "ingress.enabled needs ingress.hosts": {"ingress": ON},
    "networkPolicy keeps Prometheus out": {"networkPolicy": ON, "monitoring": {"podMonitor": ON}},
    "networkPolicy keeps pods from gcsFaultTolerance.redisAddress and config.telemetry.otlp_endpoint": {
        "networkPolicy": ON,
        "gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379"},
        "config": {"telemetry": {"otlp_endpoint": "http://collector:4317"}},
    },
    "protect_metrics keeps Prometheus out": {
        "config": METRICS,
        "keys": OPERATOR,
        "monitoring": {"podMonitor": ON},
    },
    "name a Secret with an API key in tests": {
        "config": {"server": {"require_api_key": True}},
        "keys": {"tenants": {"default": {"existingSecret": "a"}}},
    },
    "tests.existingSecret needs tests.secretKey": {"tests": {"existingSecret": "a"}},
}
TEXT = r'"((?:[^"\\]|\\.)*)"'
SENTENCES = re.compile(rf"fail (?:\(printf )?{TEXT}|printf {TEXT}[^{{}}]*\| fail|required {TEXT}")


@cache
def said(sentence: str, folder: Path) -> str:
    """In one line. The schema would stop some of them first, in words of its own."""
    values = with_values(CASES[sentence], folder)
    return " ".join(refused("4", "--skip-schema-validation", *values).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("values")


@pytest.mark.parametrize("sentence", CASES)
def test_bad_values_stop_with_a_sentence(sentence: str, folder: Path) -> None:
    assert sentence in said(sentence, folder)


def test_every_sentence_is_reached(folder: Path) -> None:
    """A check that cannot fail, or that nobody tries."""
    text = "".join(file.read_text() for file in (CHART / "templates").rglob("*") if file.is_file())
    written = {next(filter(None, found.groups())) for found in SENTENCES.finditer(text)}
    assert len(written) > 20
    patterns = {one: re.sub(r"%[sdq]", ".*", re.escape(one)) for one in written}
    everything = [said(sentence, folder) for sentence in CASES]
    unreached = [
        one for one, pattern in patterns.items() if not any(re.search(pattern, said) for said in everything)
    ]
    assert unreached == []


@pytest.mark.parametrize("key", ["server.port", "telemetry.prometheus_port"])
def test_ports_of_ray_are_taken(key: str, folder: Path) -> None:
    """Two listeners on one port of a pod: the second never starts, and only its log says so."""
    group, name = key.split(".")
    for port in (6379, 8080, 8265, 10001, 10002, 19999, 44217, 44227, 52365):
        message = refused("4", *with_values({"config": {group: {name: port}}}, folder))
        assert f"config.{key} is {port}" in message and "set service.port" in message
    assert "as config.server.port is" in refused("4", "--set", "config.server.port=9464")


MISNAMED: list[tuple[Values, str]] = [
    ({"fallback_drafter": "x"}, "fallback_drafter"),
    ({"speculation": {"canary": {"drafter": "x", "share": 0.1}}}, "speculation.canary.drafter"),
    ({"choices": [{"drafter": "lookup"}, {"drafter": "x"}]}, "choices[1].drafter"),
    (
        {"classes": [{"name": "a", "when": {"route": "chat"}, "fallback_drafter": "x"}]},
        "classes[0].fallback_drafter",
    ),
]


@pytest.mark.parametrize(("tenant", "place"), MISNAMED, ids=[place for _, place in MISNAMED])
def test_a_drafter_that_there_is_not_is_named(tenant: Values, place: str, tmp_path: Path) -> None:
    """Wherever the configuration takes one: the application would tell when all pods are there."""
    values = {"config": {"tenants": {"a": tenant, "b": {"drafter": None, "speculation": {"canary": None}}}}}
    assert f"config.tenants.a.{place}: config.drafters has no x" in refused(
        "4", *with_values(values, tmp_path)
    )


@pytest.mark.parametrize("major", VERSIONS)
def test_the_schema_leaves_names_of_pools_to_the_chart(major: str) -> None:
    """Helm tells of a name that does not fit a pattern at the path of some other value."""
    assert "pools.H100: give it another name" in refused(major, "--set", "pools.H100.gpus=8")


@pytest.mark.parametrize("major", VERSIONS)
@pytest.mark.parametrize(
    ("values", "seen"),
    [
        ({"imgae": {}}, "imgae"),
        ({"pools": {"main": {"gpu": 1}}}, "gpu"),
        ({"pools": {"main": {"gpus": "one"}}}, "gpus"),
        ({"config": {"target": {"modell": "a"}}}, "modell"),
        ({"config": {"server": {"port": "http"}}}, "port"),
        ({"upgrade": {"strategy": "Rolling"}}, "strategy"),
        ({"head": {"resources": {"limits": {"cpu": "1"}}}}, "limits"),
        ({"pools": {"main": {"resources": {"cpu": 0.5}}}}, "cpu"),
        ({"pools": {"main": {"nodeSelector": {"gpu": True}}}}, "nodeSelector"),
        ({"imagePullSecrets": ["registry"]}, "imagePullSecrets"),
        ({"ingress": {"enabled": True, "hosts": ["llm.example.com"]}}, "hosts"),
        ({"ingress": {"enabled": True, "hosts": [{"paths": ["/v1"]}]}}, "hosts"),
        ({"head": {"extraEnv": ["A=b"]}}, "extraEnv"),
        ({"head": {"extraVolumes": [{"emptyDir": {}}]}}, "extraVolumes"),
        ({"probes": {"startup": {"periodSeconds": "10"}}}, "periodSeconds"),
        ({"pools": {"main": {"extraEnv": [{"name": "A", "value": 1}]}}}, "extraEnv"),
        ({"rayVersion": "latest"}, "rayVersion"),
        ({"monitoring": None}, "monitoring"),
    ],
)
def test_the_schema_stops_what_it_can(major: str, values: Values, seen: str, tmp_path: Path) -> None:
    """Helm 3 ignores what it does not know of a newer draft of JSON schema."""
    assert seen in refused(major, *with_values(values, tmp_path))
