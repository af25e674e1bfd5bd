"""The chart as it renders with the values of ci/ and with every option on; each is rendered once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from gammaray.cluster.declaration import declaration
from gammaray.config import Config
from support.helm import CI, VERSIONS, rendered
from support.kuberay import labels_of_pods
from support.manifests import groups

EVERY = Path(__file__).parents[1] / "helm" / "every-values.yaml"
FILES = [pytest.param(file, id=file.stem.removesuffix("-values")) for file in [*CI, EVERY]]
each_helm = pytest.mark.parametrize("major", VERSIONS)
each_file = pytest.mark.parametrize("file", FILES)


@cache
def objects(major: str, file: Path) -> list[dict[str, Any]]:
    return rendered(major, "--values", file)


def service(file: Path) -> dict[str, Any]:
    """The RayService."""
    return next(found for found in objects("4", file) if found["kind"] == "RayService")


def pools(file: Path) -> dict[str, dict[str, Any]]:
    """The head and the groups of workers, by name."""
    return dict(groups(service(file)["spec"]["rayClusterConfig"]))


def mounts(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The volumes of the one container of a pod, by where they are."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
    (container,) = pod["spec"]["containers"]
    return {one["mountPath"]: volumes[one["name"]] for one in container.get("volumeMounts", [])}


def configured(file: Path, folder: Path) -> Config:
    """The configuration as the product reads it, with a key in each mount of keys; these lie in `folder`."""
    given = arguments(file)
    if given["keys"]:
        for path in mounts(pools(file)["head"]["template"]):
            if path.startswith(given["keys"]):
                place = folder / path.removeprefix(f"{given['keys']}/")
                place.mkdir(parents=True)
                (place / "web").write_text(f"key-of-{path}")
        given = given | {"keys": str(folder)}
    return declaration(given).configured()


def arguments(file: Path) -> dict[str, Any]:
    """What gammaray.cluster.service:application is given."""
    (application,) = yaml.safe_load(service(file)["spec"]["serveConfigV2"])["applications"]
    found: dict[str, Any] = application["args"]
    return found


def one(file: Path, kind: str, name: str) -> dict[str, Any]:
    (found,) = (o for o in objects("4", file) if (o["kind"], o["metadata"]["name"]) == (kind, name))
    return found


def selected(file: Path, labels: dict[str, str]) -> set[str]:
    """Groups of a release whose pods have these."""
    return {
        name
        for name, own in labels_of_pods(service(file)).items()
        if labels and labels.items() <= own.items()
    }
