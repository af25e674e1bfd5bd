"""Names that people give, where YAML reads something else: a pool of Norway, a release that is a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import manifests
from support.charts import EVERY
from support.helm import VERSIONS, rendered, with_values
from support.kuberay import labels_of_pods

# The one that helm's own YAML reads as a truth value, and PyYAML does not, is "y".
POOLS = ["no", "null", "true", "y"]


def service(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return next(found for found in objects if found["kind"] == "RayService")


@pytest.mark.parametrize("major", VERSIONS)
def test_names_stay_text(major: str, tmp_path: Path) -> None:
    """A label or name that is no text is refused by the API server, after helm said that all is well."""
    values = {
        "fullnameOverride": "on",
        "nameOverride": "123",
        "pools": {"main": None} | {name: {"replicas": 2} for name in POOLS},
        "serviceAccount": {"name": "404"},
        "modelCache": {"enabled": True, "storageClass": "1"},
        "keys": {"tenants": None},
        "kueue": {"queueName": "4"},
    }
    objects = rendered(major, *with_values(values, tmp_path), release="2026")
    assert [wrong for one in objects for wrong in manifests.problems(one)] == []
    pods = labels_of_pods(service(objects))
    budgets = [one["spec"] for one in objects if one["kind"] == "PodDisruptionBudget"]
    of = [
        [name for name, labels in pods.items() if budget["selector"]["matchLabels"].items() <= labels.items()]
        for budget in budgets
    ]
    assert of == [[name] for name in POOLS] and {budget["minAvailable"] for budget in budgets} == {1}


def test_names_of_others_stay_text(tmp_path: Path) -> None:
    """Secrets, their keys, classes and queues: whoever made them chose the names."""
    secret = {"existingSecret": "1", "secretKey": "2"}
    values = {
        "fullnameOverride": "on",
        "keys": {"tenants": {"chat": {"existingSecret": "1"}}, "operator": {"existingSecret": "1"}},
        "huggingFace": secret,
        "gcsFaultTolerance": secret,
        "tests": secret,
        "auth": {"existingSecret": "1"},
        "monitoring": {"operatorKey": "2024"},
        "ingress": {"className": "3"},
        "head": {"priorityClassName": "5", "runtimeClassName": "6"},
    }
    objects = rendered("4", "--values", EVERY, *with_values(values, tmp_path))
    assert [wrong for one in objects for wrong in manifests.problems(one)] == []


def test_a_path_of_an_ingress_has_a_type(tmp_path: Path) -> None:
    hosts = [{"host": "llm.example.com", "paths": [{"path": "/v1"}]}]
    objects = rendered("4", *with_values({"ingress": {"enabled": True, "hosts": hosts}}, tmp_path))
    (ingress,) = (one for one in objects if one["kind"] == "Ingress")
    assert manifests.problems(ingress) == []
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/v1", "Prefix")
