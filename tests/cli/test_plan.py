"""`gammaray plan` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
target: {model: org/target-8B, max_model_len: 4096}
drafters:
  small: {method: model, model: org/draft-1B}
  lookup: {method: ngram}
tenants:
  chat: {drafter: small}
  code: {drafter: lookup}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, one too large for any node, and two nodes: NVLink, and PCIe only."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "large.yaml").write_text("target: {model: org/target-900B}")
    for name, cell in (("nvlink", "NV18"), ("pcie", "SYS")):
        matrix = [["X" if i == j else cell for j in range(2)] for i in range(2)]
        data = {"gpu_name": "NVIDIA H100 80GB HBM3", "matrix": matrix}
        (folder / f"{name}.json").write_text(json.dumps(data))
    return folder


def plan(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gammaray.cli", "plan", *arguments]
    environment = {"HF_HUB_CACHE": str(folder / "none"), "PATH": "", "PYTHONUTF8": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder, env=environment)


def test_json_has_the_shape_that_scripts_rely_on(files: Path) -> None:
    done = plan(files, "config.yaml", "--topology", "nvlink.json", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    target, draft, light = data["placements"]
    assert set(target) == {
        "tenant", "role", "drafter", "node", "gpus", "mode", "reason",
        "replica", "worker", "spare", "uuids", "memory_fraction",
    }  # fmt: skip
    assert (target["role"], target["tenant"], target["node"], target["gpus"]) == (
        "target",
        None,
        "nvlink",
        [0],
    )
    assert (draft["role"], draft["tenant"], draft["drafter"], draft["gpus"], draft["mode"]) == (
        "draft", "chat", "small", [1], "split"
    )  # fmt: skip
    assert (light["tenant"], light["mode"], light["memory_fraction"]) == ("code", "in-process", None)
    assert data["unplaced"] == []
    assert any("NVLink makes no difference" in note for note in data["notes"])


def test_text_tells_where_and_why(files: Path) -> None:
    done = plan(files, "config.yaml", "--topology", "pcie.json")
    assert done.returncode == 0
    first, why, *rest = done.stdout.splitlines()
    assert "target replica 0" in first and "pcie" in first and "GPU 0" in first and "same-gpu" in first
    assert why.startswith("      ")
    assert "draft small of chat" in rest[0] and "PCIe SYS" in rest[1]


@pytest.mark.parametrize("more", [["--topology", "pcie.json"], ["pcie.json"]])
def test_several_nodes(files: Path, more: list[str]) -> None:
    done = plan(files, "config.yaml", "--topology", "nvlink.json", *more, "--json")
    placed = json.loads(done.stdout)["placements"]
    assert {entry["node"] for entry in placed} == {
        "nvlink"
    }  # the target goes where its drafter has a partner


def test_what_is_not_placed_is_a_finding(files: Path) -> None:
    done = plan(files, "large.yaml", "--topology", "pcie.json", "--json")
    assert done.returncode == 1
    (missing,) = json.loads(done.stdout)["unplaced"]
    assert set(missing) == {"what", "reason", "needs"}
    text = plan(files, "large.yaml", "--topology", "pcie.json")
    assert text.returncode == 1 and "NOT PLACED" in text.stdout and missing["needs"] in text.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.yaml"], "cannot read configuration"),
        (["config.yaml", "--topology", "nowhere.json"], "cannot read topology"),
        (["config.yaml", "--topology", "config.yaml"], "config.yaml"),
    ],
)
def test_bad_input_is_2(files: Path, arguments: list[str], says: str) -> None:
    done = plan(files, *arguments)
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr


def test_a_gpu_name_tells_the_version(files: Path) -> None:
    named = plan(
        files, "config.yaml", "--topology", "nvlink.json", "--gpu-name", "NVIDIA A100-SXM4-80GB", "--json"
    )
    draft = json.loads(named.stdout)["placements"][1]
    assert draft["mode"] == "same-gpu" and "version 3, below 4" in draft["reason"]


def test_names_are_shown_in_one_line(files: Path) -> None:
    """Line breaks, escape codes and lone surrogates: output is for terminals."""
    name = "a\nb\x1b[31m\ud800"
    whole = json.loads((files / "nvlink.json").read_text())
    (files / "odd.json").write_text(json.dumps(whole | {"node": name, "gpu_name": f"H100 {name}"}))
    done = plan(files, "config.yaml", "--topology", "odd.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}  GPU 0"
        in done.stdout
    )
    assert "\x1b" not in done.stdout


def test_nothing_heavy_is_imported(files: Path) -> None:
    """Importing one of them takes seconds."""
    code = """
import json, sys
from gammaray.cli import app
try:
    app(["plan", "config.yaml", "--topology", "nvlink.json"])
except SystemExit as done:
    print(json.dumps([done.code, sorted({"torch", "ray", "transformers", "numpy"} & set(sys.modules))]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=files)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]


@pytest.mark.parametrize(
    ("asked", "code", "says"),
    [
        ("replicas: 1", 0, "was never carried out on real ones: see docs/never-run.md"),
        ("deterministic: true", 1, "deterministic works on CPUs only"),
        ("tensor_parallel: 2, replicas: 2", 1, "tensor_parallel works on CPUs only"),
    ],
)
def test_a_plan_for_gpus_says_what_would_become_of_it(
    asked: str, code: int, says: str, tmp_path: Path
) -> None:
    """`serve` would fail late, after the weights are on their way."""
    file = tmp_path / "node.json"
    file.write_text('{"gpu_name": "NVIDIA H100 80GB HBM3", "matrix": [["X", "NV18"], ["NV18", "X"]]}')
    config = tmp_path / "c.yaml"
    config.write_text(f"target: {{model: some-8B, {asked}}}")
    done = plan(tmp_path, str(config), "--topology", str(file))
    assert (done.returncode, done.stdout.count(says)) == (code, 1), done.stdout
    assert ("GPU 0" in done.stdout) is (code == 0)  # what is refused has no place


@pytest.mark.parametrize(("model", "code"), [("org/target-900000B", 1), ("org/target-1M", 0), ("org/any", 0)])
def test_weights_beyond_this_machine_s_memory_are_a_finding(model: str, code: int, tmp_path: Path) -> None:
    """Without it a plan for CPUs is no evidence at all."""
    config = tmp_path / "c.yaml"
    config.write_text(f"target: {{model: {model}}}")
    done = plan(tmp_path, str(config))
    if "  GPU " in done.stdout:
        pytest.skip("this machine has GPUs")
    assert done.returncode == code, done.stdout
    assert ("of memory in all" in done.stdout) is (code == 1)
    assert ("whether memory suffices was not checked" in done.stdout) is (model == "org/any")
