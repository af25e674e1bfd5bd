"""Imports point one way: cluster -> {api, actors} -> {engine, routing, telemetry} -> kernels -> torch.

Within kernels, Triton belongs to kernels/fused, which the dispatchers import when they choose it, and nobody
else: on a machine without Triton everything else must import.

A plain walk over the syntax trees: it sees imports inside functions and under TYPE_CHECKING, and rooms
without an __init__.py, which import-graph tools skip.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = {"types", "errors"}
BASE = CORE | {"config", "drafter_config", "packaged", "papers", "validation"}
ROOMS = {"kernels", "routing", "telemetry", "api", "engine", "actors", "cluster", "training"}
ALLOWED = {  # of gammaray's own; a room may always import itself
    "__init__": set(),
    "types": set(),
    "errors": set(),
    "validation": CORE,
    "yamlfile": CORE,
    "config": CORE | {"drafter_config", "packaged", "validation", "yamlfile"},
    "drafter_config": CORE | {"validation"},
    "papers": CORE | {"validation"},
    "packaged": CORE | {"papers"},
    "drafter_names": BASE | {"yamlfile"},
    "kernels": CORE,
    "engine": BASE | {"drafter_names", "kernels"},
    "routing": BASE,
    "telemetry": BASE,
    "api": BASE | {"telemetry"},
    "actors": BASE | {"kernels", "engine", "routing", "telemetry"},
    "cluster": BASE | {"kernels", "engine", "routing", "telemetry", "actors", "api", "yamlfile"},
    "training": BASE | {"drafter_names", "kernels", "engine"},
    "tenants_cli": BASE | {"yamlfile", "routing"},
    "train_cli": BASE | {"drafter_names", "engine", "training"},
    "cli": BASE | ROOMS | {"drafter_names", "tenants_cli", "train_cli"},
}
MAY_IMPORT = {
    "ray": {"actors", "cluster"},
    "torch": {"kernels", "engine", "actors", "cluster", "training"},
}
COMMANDS = {
    "cli",
    "tenants_cli",
    "train_cli",
}  # start fast: rooms are imported by the command that needs them
STANDARD_LIBRARY_ONLY = {"__init__", "types", "errors"}
FUSED = "kernels/fused/"  # the only importers of Triton
DISPATCHERS = ("kernels/api.py", "kernels/verification.py", "kernels/bench/", "engine/attention.py")


def imports(tree: ast.AST, package: str) -> Iterator[tuple[ast.stmt, str]]:
    """(statement, absolute module) for each import; `from a import b` counts as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            stem = ".".join([*parents, *filter(None, [node.module])])
            yield from ((node, f"{stem}.{alias.name}") for alias in node.names)


def complaint(unit: str, path: str, module: str, eager: bool) -> str | None:
    """Why `unit` (a room, or a module of src/gammaray) may not import `module` in file `path`."""
    top, _, rest = module.partition(".")
    if top in ROOMS:
        return f"write gammaray.{top}"
    if top == "gammaray":
        room = rest.partition(".")[0]
        if room not in ALLOWED[unit] | {unit, "", "__version__"}:
            return f"{unit} may not import {room}"
        if rest.startswith("kernels.fused") and not path.startswith(FUSED):
            if not path.startswith(DISPATCHERS):
                return f"only {', '.join(DISPATCHERS)} may import it"
            return "import it inside the function that chose it" if eager else None
        return "import it inside the function" if unit in COMMANDS and eager and room in ROOMS else None
    if unit in STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names:
        return f"{unit} uses the standard library only"
    if unit not in MAY_IMPORT.get(top, {unit}) or (unit, top) == ("kernels", "transformers"):
        return f"{unit} may not import {top}"
    return f"only {FUSED} may import triton" if top == "triton" and not path.startswith(FUSED) else None


def modules(package: Path) -> list[Path]:
    """Every Python file under `package`, through the links of the rooms."""
    inside = (file for entry in package.iterdir() if entry.is_dir() for file in entry.rglob("*.py"))
    return sorted([*package.glob("*.py"), *inside])


def violations(package: Path) -> list[str]:
    """One line for each import under `package` (src/gammaray) that points the wrong way."""
    found = []
    for file in modules(package):
        path = file.relative_to(package).as_posix()
        unit = path.partition("/")[0].removesuffix(".py")
        if unit not in ALLOWED:
            found.append(f"{path}: give {unit} a row in ALLOWED")
            continue
        tree = ast.parse(file.read_text())
        for node, module in imports(tree, ".".join(["gammaray", *path.split("/")[:-1]])):
            reason = complaint(unit, path, module, eager=node in tree.body)
            found += [f"{path}:{node.lineno}: imports {module}: {reason}"] if reason else []
    return found


def test_imports_point_one_way() -> None:
    package = ROOT / "src" / "gammaray"
    assert {file.relative_to(package).parts[0] for file in modules(package)} >= ROOMS, "a room was not read"
    assert violations(package) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/a.py", "import transformers"),
        ("kernels/deep/a.py", "import triton.language as tl"),
        ("kernels/deep/fused/a.py", "def f():\n    import triton"),
        ("kernels/api.py", "from gammaray.kernels.fused.attention import attend"),
        ("kernels/api.py", "from gammaray.kernels import fused"),
        ("kernels/a.py", "def f():\n    from gammaray.kernels.fused.attention import attend"),
        ("engine/a.py", "def f():\n    from gammaray.kernels.fused.move import move_kv"),
        ("kernels/a.py", "from gammaray.engine.scheduler import Scheduler"),
        ("engine/a.py", "def f():\n    import ray"),
        ("engine/deep/a.py", "from ...gammaray.api import schema"),
        ("engine/deep/a.py", "from ... import api"),
        (
            "engine/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gammaray import cluster",
        ),
        ("routing/a.py", "import torch"),
        ("api/a.py", "from gammaray import engine"),
        ("api/a.py", "from gammaray.engine import step"),
        ("actors/a.py", "import gammaray.cluster.app"),
        ("cluster/a.py", "import engine.step"),
        ("types.py", "import numpy"),
        ("errors.py", "import fastapi"),
        ("config.py", "import torch"),
        ("cli.py", "from gammaray.cluster import app"),
        ("cli.py", "def serve():\n    import ray"),
        ("stray.py", ""),
    ],
)
def test_a_planted_violation_is_caught(tmp_path: Path, path: str, source: str) -> None:
    plant(tmp_path, path, source)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/fused/a.py", "import triton\nimport torch\nfrom gammaray.kernels.fused import b"),
        ("kernels/bench/a.py", "def f():\n    from gammaray.kernels.fused.attention import attend"),
        (
            "engine/a.py",
            "import torch\nimport transformers\nfrom gammaray.kernels import api\nfrom . import b",
        ),
        (
            "actors/a.py",
            "import ray\nfrom gammaray.engine import step\nfrom gammaray.types import TokenChunk",
        ),
        ("cli.py", "import typer\ndef serve():\n    from gammaray.cluster import app"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, path: str, source: str) -> None:
    plant(tmp_path, path, source)
    assert violations(tmp_path) == []


def plant(package: Path, path: str, source: str) -> None:
    file = package / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)


def test_rooms_are_namespace_folders() -> None:
    """A regular package called `kernels` on sys.path would shadow the one that transformers probes."""
    assert [str(f) for room in ROOMS for f in (ROOT / room).rglob("__init__.py")] == []


def test_rooms_are_relative_links_that_resolve() -> None:
    links = {
        link.name: link.readlink() for link in (ROOT / "src" / "gammaray").iterdir() if link.is_symlink()
    }
    assert links == {room: Path("..", "..", room) for room in ROOMS}
    assert all((ROOT / room).is_dir() for room in ROOMS)


@pytest.mark.parametrize("folder", ["tests", "benchmarks", ".ci"])
def test_nothing_imports_a_room_by_its_top_level_name(folder: str) -> None:
    """It would make a second copy of every class, and isinstance would fail between the two."""
    trees = {file: ast.parse(file.read_text()) for file in (ROOT / folder).rglob("*.py")}
    found = [(str(f), m) for f, t in trees.items() for _, m in imports(t, "") if m.split(".")[0] in ROOMS]
    assert found == []
