"""Where HTTP comes in: at the ingresses, so that no stream hangs on a pod that it does not need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.charts import EVERY, arguments, each_file, pools, service
from support.helm import CHART

CI = CHART / "ci"
DEMO, TWO, STEPS = (CI / f"{name}-values.yaml" for name in ("cpu-demo", "two-pools", "upgrade"))
LEAVES = ["python", "-m", "gammaray.cluster.leave"]


def container(group: dict[str, Any]) -> dict[str, Any]:
    (found,) = group["template"]["spec"]["containers"]
    return dict(found)


def behind(file: Path) -> set[str]:
    """Groups whose pods the Service of KubeRay leads to: it looks for a port by its name, pod by pod."""
    spec = service(file)["spec"]
    ports = {port["targetPort"] for port in spec["serveService"]["spec"]["ports"]}
    found = {
        name
        for name, group in pools(file).items()
        if ports & {port["name"] for port in container(group)["ports"]}
    }
    return found - {"head"} if spec["excludeHeadPodFromServeSvc"] else found


@pytest.mark.parametrize(("file", "entrances"), [(DEMO, {"head"}), (TWO, {"ingress"}), (EVERY, {"ingress"})])
def test_requests_come_in_where_the_ingresses_are(file: Path, entrances: set[str]) -> None:
    """Through another pod's proxy, a stream would break off with a pod that only computes."""
    assert behind(file) == entrances == {arguments(file)["ingress"]["pool"] or "head"}


@each_file
def test_pods_with_an_ingress_wait_for_their_streams(file: Path) -> None:
    """Ray ends at SIGTERM, however long the grace period is."""
    waits = {name for name, group in pools(file).items() if "lifecycle" in container(group)}
    assert waits == {arguments(file)["ingress"]["pool"] or "head"}
    for name in waits:
        group = pools(file)[name]
        assert container(group)["lifecycle"]["preStop"]["exec"]["command"] == LEAVES
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= 630


def ready_by(group: dict[str, Any]) -> str:
    return str(container(group)["readinessProbe"]["httpGet"]["path"])


def test_pods_without_a_proxy_can_be_ready() -> None:
    """Serve has none where no replica is: a pod of draft workers would be unready for ever."""
    for file in (DEMO, TWO):
        asked = {name: ready_by(group) for name, group in pools(file).items()}
        assert {name for name, path in asked.items() if path == "/-/healthz"} == behind(file) - {"head"}


def test_in_steps_only_pods_with_a_proxy_are_ready() -> None:
    """Then the operator's own Service leads to every pod that is ready, by the port's number."""
    assert "serveService" not in service(STEPS)["spec"]
    asked = {name: ready_by(group) for name, group in pools(STEPS).items()}
    assert asked == {"head": "/api/healthz", "l40s": "/-/healthz"}  # the operator looks at the head's itself


def test_what_the_autoscaler_may_take_is_not_waited_for() -> None:
    """A pool that was never complete again, or in an upgrade never is: it begins at minReplicas."""
    group = pools(EVERY)["h100"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (1, 2, 4)
    assert arguments(EVERY)["pools"] == {"h100": 1, "ingress": 3}
