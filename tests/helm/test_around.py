"""What the chart sets up around the RayService finds the pods that KubeRay makes, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.charts import EVERY, objects, one, pools, selected
from support.helm import CHART, helm, refused, rendered, with_values
from support.kuberay import labels_of_pods


def selectors() -> list[dict[str, str]]:
    """Of everything that selects pods."""
    found = [
        o["spec"].get("podSelector") or o["spec"].get("selector") or {}
        for o in objects("4", EVERY)
        if "spec" in o
    ]
    monitored = "app.kubernetes.io/component"  # of the ServiceMonitor, which selects a Service
    all_ = [selector.get("matchLabels", selector) for selector in found]
    return [labels for labels in all_ if labels and monitored not in labels]


@pytest.mark.parametrize(
    ("kind", "name", "groups"),
    [
        ("PodMonitor", "everything-head", {"head"}),
        ("PodMonitor", "everything-worker", {"ingress", "h100"}),
        ("PodDisruptionBudget", "everything-h100", {"h100"}),
        ("PodDisruptionBudget", "everything-ingress", {"ingress"}),
    ],
)
def test_a_selector_finds_its_pods(kind: str, name: str, groups: set[str]) -> None:
    """Labels that KubeRay does not give: it would watch over nothing."""
    assert selected(EVERY, one(EVERY, kind, name)["spec"]["selector"]["matchLabels"]) == groups


def test_selectors_leave_other_releases_alone() -> None:
    assert len(selectors()) == 7 and all(selected(EVERY, labels) for labels in selectors())
    other = next(o for o in rendered("4", release="other") if o["kind"] == "RayService")
    pods = labels_of_pods(other).values()
    assert [labels for labels in selectors() if any(labels.items() <= pod.items() for pod in pods)] == []


def test_the_operators_service_finds_the_head() -> None:
    """KubeRay's Service RELEASE-head-svc asks for its own app.kubernetes.io/name, whatever the pod's is."""
    assert selected(EVERY, {"ray.io/node-type": "head", "app.kubernetes.io/name": "kuberay"}) == {"head"}


def test_one_pod_of_a_pool_may_go_at_a_time(tmp_path: Path) -> None:
    """None ever: a RayCluster has no scale, so that a share or maxUnavailable forbids every eviction."""
    for pool in ("h100", "ingress"):
        budget = one(EVERY, "PodDisruptionBudget", f"everything-{pool}")["spec"]
        assert budget["minAvailable"] == pools(EVERY)[pool]["replicas"] - 1
    assert not [o for o in rendered("4") if o["kind"] == "PodDisruptionBudget"]  # a pool of one
    assert "minAvailable" in refused("4", "--set", "podDisruptionBudget.minAvailable=50%")
    more = rendered("4", "--set", "podDisruptionBudget.minAvailable=9,pools.main.replicas=2")
    assert [o["spec"]["minAvailable"] for o in more if o["kind"] == "PodDisruptionBudget"] == [2]


def test_routes_lead_to_the_service_of_the_operator() -> None:
    """To the port of the pods, or to a Service that nobody makes."""
    (rule,) = one(EVERY, "Ingress", "everything")["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["backend"] == {"service": {"name": "everything-serve-svc", "port": {"number": 8200}}}
    (rule,) = one(EVERY, "HTTPRoute", "everything")["spec"]["rules"]
    assert rule == {"backendRefs": [{"name": "everything-serve-svc", "port": 8200}]}


def test_claims_and_accounts_are_those_of_the_pods() -> None:
    """A pod that asks for what nobody made stays pending."""
    spec: dict[str, Any] = pools(EVERY)["h100"]["template"]["spec"]
    volumes = [
        volume["persistentVolumeClaim"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume
    ]
    assert volumes == [{"claimName": "everything-models"}] and one(
        EVERY, "PersistentVolumeClaim", "everything-models"
    )
    assert one(EVERY, "ServiceAccount", spec["serviceAccountName"])
    template = one(EVERY, "ComputeDomain", "everything")["spec"]["channel"]["resourceClaimTemplate"]["name"]
    assert template in {claim["resourceClaimTemplateName"] for claim in spec["resourceClaims"]}


def test_more_objects_may_be_templates(tmp_path: Path) -> None:
    """Text is one; what is an object already may hold braces of its own."""
    assert one(EVERY, "ConfigMap", "demo-text")
    plain = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "plain"}, "data": {"a": "{{ b }}"}}
    assert plain in rendered("4", *with_values({"extraObjects": [plain]}, tmp_path))


def notes(*arguments: str) -> str:
    """Only helm 4 says without a cluster what an installation would print."""
    done = helm("4", "install", "demo", CHART, "--dry-run=client", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


def test_notes_name_what_there_is() -> None:
    """Commands that ask for a Service that the operator does not make, or for a test that there is not."""
    told = notes()
    for name in ("rayservice/demo-gammaray", "service/demo-gammaray-serve-svc", "helm test demo"):
        assert name in told
    assert "helm test" not in notes("--set", "tests.enabled=false")
    told = notes("--values", str(CHART / "ci" / "upgrade-values.yaml"))
    assert "gateway/demo-gammaray-gateway" in told and "helm test" not in told and "serve-svc" not in told


def test_notes_lead_to_an_answer() -> None:
    """A chat that ends in 401, a local port that only root may have, a tunnel beside the way in."""
    told = notes("--values", str(CHART / "ci" / "two-pools-values.yaml"))
    assert "export GAMMARAY_API_KEY=" in told and "gammaray chat --url https://llm.example.com\n" in told
    assert "port-forward" not in told
    route = [
        "--set",
        "httpRoute.enabled=true,httpRoute.parentRefs[0].name=a,httpRoute.hostnames[0]=b.example",
    ]
    assert "gammaray chat --url https://b.example\n" in notes(*route)
    plain = notes("--set", "service.port=80")
    assert " 8000:80 &\n" in plain and "--url http://127.0.0.1:8000\n" in plain and "KEY" not in plain
    assert " 8200:8200 &\n" in notes("--set", "service.port=8200")
