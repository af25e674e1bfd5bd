"""What the chart renders to, with the values of ci/ and with every option on: as a cluster would take it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml
from support import kuberay, manifests
from support.charts import each_file, each_helm, objects, service
from support.helm import CHART, CI, helm, rendered


@each_helm
@each_file
def test_helm_finds_nothing(major: str, file: Path) -> None:
    done = helm(major, "lint", "--strict", CHART, "--values", file)
    assert done.returncode == 0, done.stdout + done.stderr


@each_file
def test_old_and_new_helm_render_the_same(file: Path) -> None:
    """A function of templates that one of them lacks, or a number that one writes as 1e+06."""
    assert objects("3", file) == objects("4", file)


@each_file
def test_a_cluster_takes_every_object(file: Path) -> None:
    """A misspelt or misplaced field, two objects of one name, a kind that is not there."""
    found = objects("4", file)
    names = Counter((one["kind"], one["metadata"]["name"]) for one in found)
    assert {name: count for name, count in names.items() if count > 1} == {}
    assert {one["kind"]: wrong for one in found if (wrong := manifests.problems(one))} == {}


@each_file
def test_kuberay_has_a_schema_of_the_service(file: Path) -> None:
    """The test above says nothing of it where the definitions are not."""
    manifests.needs_crds()
    assert manifests.problems(service(file)) == []


@each_file
def test_a_cluster_takes_the_pods_of_the_service(file: Path) -> None:
    """KubeRay makes them later, so no install would show their faults."""
    pods = list(manifests.pods(service(file)))
    assert len(pods) > 1
    assert {pod["metadata"]["name"]: wrong for pod in pods if (wrong := manifests.problems(pod))} == {}


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_the_oldest_kubernetes_of_the_chart_takes_them(file: Path) -> None:
    """A field that came after the version which Chart.yaml promises."""
    promised = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    oldest = promised.removeprefix(">=").rsplit(".", 1)[0]
    found = [*objects("4", file), *manifests.pods(service(file))]
    assert {one["kind"]: wrong for one in found if (wrong := manifests.problems(one, oldest))} == {}


@each_file
def test_an_operator_takes_the_service(file: Path) -> None:
    """Its own rules, which it tells in an event that nobody reads, after helm said that all is well."""
    assert kuberay.refusals(service(file)) == []


@pytest.mark.parametrize("storage", ["rocksdb.storageClass=fast", "rocksdb.existingClaim=gcs"])
def test_rocksdb_needs_its_gate_and_no_more(storage: str) -> None:
    given = [f"gcsFaultTolerance.{part}" for part in ("enabled=true", "backend=rocksdb", storage)]
    objects = rendered("4", *(part for one in given for part in ("--set", one)))
    found = next(one for one in objects if one["kind"] == "RayService")
    gate = "GCSFaultToleranceEmbeddedStorage"
    assert manifests.problems(found) == [] and kuberay.refusals(found) == [f"rocksdb needs {gate}"]
    assert kuberay.refusals(found, frozenset({gate})) == []


def test_defaults_need_no_operator_but_kuberays() -> None:
    """Values that ask for kinds which a plain cluster does not have."""
    assert {found["kind"] for found in rendered("4")} == {"RayService", "ServiceAccount", "Pod"}
