"""The life of a release on a fake API server: objects are stored and checked there, and nothing ever runs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import manifests
from support.charts import EVERY
from support.fake_kube import fake_kube
from support.helm import CHART, TIMEOUT_S, VERSIONS, rendered, tool, with_values
from support.kube_store import FakeKube

NAMESPACE = "serving"
DEMO = CHART / "ci" / "cpu-demo-values.yaml"
TWO = CHART / "ci" / "two-pools-values.yaml"
ANSWERS = {"conditions": [{"type": "Ready", "status": "True"}]}  # as KubeRay would say of a RayService
OTHERS = ("monitoring.coreos.com", "gateway.networking.k8s.io", "resource.nvidia.com")


@dataclass(frozen=True)
class Cluster:
    """A fake one, and one helm's way to it."""

    kube: FakeKube
    kubeconfig: Path
    major: str

    def run(self, name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [tool(name, self.major), *map(str, arguments), "--namespace", NAMESPACE]
        environ = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "KUBECONFIG": str(self.kubeconfig)}
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environ)

    def does(self, name: str, *arguments: object) -> str:
        """What it prints. Fails the test when it says no."""
        done = self.run(name, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def helm(self, *arguments: object) -> str:
        return self.does("helm", *arguments)

    def refused(self, *arguments: object) -> str:
        """What helm says. Fails the test when it does as it is told."""
        done = self.run("helm", *arguments)
        assert done.returncode != 0, done.stdout
        return done.stderr

    def service(self, name: str = "demo-gammaray") -> Any:
        return self.kube.objects["rayservices", NAMESPACE, name]

    def objects(self) -> list[Any]:
        """All of them but helm's own records."""
        places = [place for place in self.kube.objects if place[1] == NAMESPACE]
        return [self.kube.objects[one] for one in places if not one[2].startswith("sh.helm.release")]


@pytest.fixture(params=VERSIONS)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with fake_kube(tmp_path, NAMESPACE) as (kube, kubeconfig):
        yield Cluster(kube, kubeconfig, request.param)


def contents(found: Iterable[Any]) -> dict[tuple[str, str], Any]:
    """What is in each object, but for what a server and helm add to it."""
    return {
        (one["kind"], one["metadata"]["name"]): {name: one.get(name) for name in ("spec", "data")}
        for one in found
    }


def test_a_release_comes_changes_goes_back_and_goes(cluster: Cluster) -> None:
    """Objects that an upgrade leaves behind, a list that is merged into the old one, a rollback by halves."""
    first = ("--values", DEMO)
    second = ("--values", TWO, "--set", "monitoring.serviceMonitor.enabled=true")
    third = (*second, "--set", "config.telemetry.prometheus_port=9600")
    for command, values in (("install", first), ("upgrade", second), ("upgrade", third)):
        cluster.helm(command, "demo", CHART, *values)
        assert contents(cluster.objects()) == contents(rendered(cluster.major, "--no-hooks", *values))
    for revision, values in (("2", second), ("1", first)):
        cluster.helm("rollback", "demo", revision)
        assert contents(cluster.objects()) == contents(rendered(cluster.major, "--no-hooks", *values))
    cluster.helm("uninstall", "demo")
    assert cluster.objects() == []


def test_a_newer_chart_changes_no_pod_and_nothing_that_is_fixed(cluster: Cluster, tmp_path: Path) -> None:
    """The chart's version in a claim's spec is refused, and in a pod it makes a whole new cluster."""
    newer = shutil.copytree(CHART, tmp_path / "gammaray")
    about = yaml.safe_load((newer / "Chart.yaml").read_text())
    (newer / "Chart.yaml").write_text(yaml.safe_dump(about | {"version": "9.9.9", "appVersion": "9.9.9"}))
    cluster.helm("install", "demo", CHART, "--values", EVERY)
    before = cluster.service("everything")
    cluster.helm("upgrade", "demo", newer, "--values", EVERY)
    after = cluster.service("everything")
    assert after["metadata"]["labels"]["helm.sh/chart"] == "gammaray-9.9.9"
    assert after["spec"] == before["spec"]  # every-values.yaml names the image


def test_what_is_served_can_change_without_a_new_cluster(cluster: Cluster) -> None:
    """A tenant's setting, or a pod more, that costs every pod: KubeRay compares all but the replicas."""
    cluster.helm("install", "demo", CHART, "--values", DEMO)
    before = cluster.service()["spec"]
    change = ["--set", "config.tenants.default.speculation.gamma=3", "--set", "pools.main.replicas=2"]
    cluster.helm("upgrade", "demo", CHART, "--values", DEMO, *change)
    after = cluster.service()["spec"]
    assert before["serveConfigV2"] != after["serveConfigV2"]
    for spec in (before, after):
        for group in spec["rayClusterConfig"]["workerGroupSpecs"]:
            for field in ("replicas", "minReplicas", "maxReplicas"):
                del group[field]
    assert before["rayClusterConfig"] == after["rayClusterConfig"]


def test_a_changed_configuration_can_be_an_upgrade(cluster: Cluster) -> None:
    """A restart in place where a new cluster was asked for, or a new cluster where nothing changed."""
    given = ("--values", DEMO, "--set", "upgrade.configChange=new-cluster")
    pods = []
    cluster.helm("install", "demo", CHART, *given)
    for gamma in (8, 3, 8):
        cluster.helm(
            "upgrade", "demo", CHART, *given, "--set", f"config.tenants.default.speculation.gamma={gamma}"
        )
        pods.append(cluster.service()["spec"]["rayClusterConfig"])
    assert pods[0] == pods[2] != pods[1]


def test_a_bad_field_is_refused_by_its_path(cluster: Cluster, tmp_path: Path) -> None:
    """The chart's schema cannot know what stands in a volume; a server does."""
    manifests.needs_crds()
    cluster.helm("install", "demo", CHART, "--values", DEMO)
    before = cluster.service()["spec"]
    values = with_values({"pools": {"main": {"extraVolumes": [{"name": "more", "hostpath": {}}]}}}, tmp_path)
    said = cluster.refused("upgrade", "demo", CHART, *values)
    assert "spec.rayClusterConfig.workerGroupSpecs.0.template.spec.volumes" in said
    assert "'hostpath' was unexpected" in said
    assert cluster.service()["spec"] == before


@pytest.mark.parametrize("major", VERSIONS)
def test_a_cluster_with_kuberay_alone_is_enough(major: str, tmp_path: Path) -> None:
    """A monitor or a route that is there before anybody asked for it: helm then refuses the whole release."""
    with fake_kube(tmp_path, NAMESPACE, *OTHERS) as (kube, kubeconfig):
        cluster = Cluster(kube, kubeconfig, major)
        cluster.helm("install", "demo", CHART)
        said = cluster.refused("upgrade", "demo", CHART, "--set", "monitoring.podMonitor.enabled=true")
        assert 'no matches for kind "PodMonitor"' in said


def test_the_notes_can_be_followed(cluster: Cluster) -> None:
    """Commands that name what is not there. Only the port-forward cannot be tried: no pod has a port here."""
    notes = cluster.helm("install", "demo", CHART, "--values", DEMO)
    commands = [shlex.split(line) for line in notes.splitlines() if line.startswith("   ")]
    cluster.service()["status"] = ANSWERS
    told = {
        " ".join(one[:2]): cluster.does(*one) for one in commands if one[1] in ("wait", "test", "describe")
    }
    assert "condition met" in told["kubectl wait"] and "Succeeded" in told["helm test"]
    assert "demo-gammaray" in told["kubectl describe"]
    others = {" ".join(one[:2]): one[2] for one in commands if " ".join(one[:2]) not in told}
    assert others["kubectl port-forward"] == "service/demo-gammaray-serve-svc"
    assert others.keys() <= {"kubectl port-forward", "gammaray chat"}


def test_the_test_of_a_release_tells_when_its_pod_fails(cluster: Cluster) -> None:
    cluster.helm("install", "demo", CHART, "--values", DEMO)
    cluster.kube.phase = "Failed"
    assert "demo-gammaray-chat" in cluster.refused("test", "demo")
