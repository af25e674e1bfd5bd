"""`gammaray topology` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.nvml import Library, compiled, fabric, switched

from gammaray.cluster.matrix import read


def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gammaray.cli", "topology", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


MATRIX = [["X", "NV12", "SYS", "SYS"], ["NV12", "X", "SYS", "SYS"], ["SYS", "SYS", "X", "NODE"]]
BRIDGED = {
    "gpu_name": "NVIDIA A100 80GB PCIe",
    "matrix": [*MATRIX, ["SYS", "SYS", "NODE", "X"]],
    "numa": None,
}


@pytest.fixture
def bridged(tmp_path: Path) -> Path:
    file = tmp_path / "box.json"
    file.write_text(json.dumps(BRIDGED))
    return file


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return compiled(tmp_path_factory.mktemp("driver"))


def test_json_has_the_promised_shape(bridged: Path) -> None:
    done = run("--from", bridged, "--min-nvlink-version", 3, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert [(gpu["index"], bool(gpu["uuid"])) for gpu in data["gpus"]] == [(i, True) for i in range(4)]
    assert data["islands"] == [[0, 1], [2], [3]]
    assert [entry["pair"] for entry in data["excluded"]] == [[0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    assert all(entry["reason"] for entry in data["excluded"])
    assert "nodes" not in data


def test_text_says_why_in_few_lines(bridged: Path) -> None:
    lines = run("--from", bridged).stdout.splitlines()
    assert lines[0] == "node box: 4 GPUs"
    assert lines[1] == "  GPU 0  NVIDIA A100 80GB PCIe  78.4 GiB  NVLink 3    box:0"
    assert lines[5] == "islands at NVLink >= 4: [0]  [1]  [2]  [3]"
    assert lines[6] == "  not linked: 0-1: 12 NVLinks, but of version 3, below 4"
    assert lines[7].startswith("  not linked: 0-2, 0-3, 1-2, 1-3: no direct NVLink (PCIe SYS")
    assert len(lines) == 9


def test_names_are_shown_in_one_line(tmp_path: Path) -> None:
    name = "a\nb\x1b[31m\ud800"
    (tmp_path / "odd.json").write_text(json.dumps({"node": name, "gpu_name": name, "matrix": [["X"]]}))
    done = run("--from", tmp_path / "odd.json", env={**os.environ, "PYTHONUTF8": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    shown = "\N{REPLACEMENT CHARACTER}".join(["a", "b", "[31m", ""])
    first, second, *_ = done.stdout.splitlines()
    assert first == f"node {shown}: 1 GPU" and shown in second


def test_a_name_on_the_command_line(bridged: Path) -> None:
    data = json.loads(run("--from", bridged, "--gpu-name", "NVIDIA H100 NVL", "--json").stdout)
    assert data["islands"] == [[0, 1], [2], [3]]


def test_sixteen_gpus_need_few_lines_and_little_time(library: Library) -> None:
    table = switched(16, 6, version=2, name="Tesla V100-SXM3-32GB")
    table |= {"state 0 0": "0", "fabric 5": fabric(state=1)}
    began = time.monotonic()
    done = run(env=library.environment(table))
    assert time.monotonic() - began < 3
    assert len(done.stdout.splitlines()) < 25
    assert "0-1, 0-2, 0-3, 0-4, 0-6, 0-7, 0-8, 0-9 and 6 more: 5 NVLinks, but of version 2" in done.stdout


def test_saved_here_looks_the_same_elsewhere(library: Library, tmp_path: Path) -> None:
    env = library.environment(switched(4, 18) | {"fabric 3": fabric(status=999)})
    env["CUDA_VISIBLE_DEVICES"] = "1,3"
    here = run("--save", tmp_path / "saved.json", "--json", env=env)
    there = run("--from", tmp_path / "saved.json", "--json")
    assert (here.returncode, here.stdout) == (0, there.stdout)
    data = json.loads(there.stdout)
    assert data["islands"] == [[0, 1, 2], [3]]
    assert data["notes"] == ["CUDA_VISIBLE_DEVICES leaves this process of these GPUs: 1, 3"]
    (tmp_path / "report.json").write_text(there.stdout)
    assert read(tmp_path / "report.json") == read(tmp_path / "saved.json")


def test_several_nodes(library: Library, bridged: Path, tmp_path: Path) -> None:
    env = library.environment(switched(2, 18) | {f"fabric {gpu}": fabric(cluster=9) for gpu in (0, 1)})
    run("--save", tmp_path / "tray.json", env=env)
    sources = ("--from", tmp_path / "tray.json", "--from", tmp_path / "tray.json", "--from", bridged)
    data = json.loads(run(*sources, "--json", "--save", tmp_path / "all.json").stdout)
    names = [node["node"] for node in data["nodes"]]
    assert (len(set(names)), names[2]) == (3, "box")
    assert [node["islands"] for node in data["nodes"]] == [[[0, 1]], [[0, 1]], [[0], [1], [2], [3]]]
    assert data["islands"] == [[0, 1]]
    assert data["fabric_islands"] == [[[name, gpu] for name in sorted(names[:2]) for gpu in (0, 1)]]
    text = run("--from", tmp_path / "all.json").stdout
    assert text.count("node ") == 3 and "one NVLink fabric across nodes: " in text


def test_mig_parts_are_shown(library: Library) -> None:
    table = switched(1, 18) | {"mig 0": "1", "parts 0": "7", "part 0 2": "", "uuid 102": "MIG-1"}
    done = run(env=library.environment(table | {"memory 102": str(10 * 2**30)}))
    assert "GPU-00000000-0000  MIG: 10.0 GiB" in done.stdout


def test_a_machine_without_gpus_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    done = run("--json", env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert done.returncode == 0
    data = json.loads(done.stdout)
    assert (data["gpus"], data["islands"], data["excluded"]) == ([], [], [])
    assert "no NVIDIA driver" in data["notes"][0]
    assert "no GPUs" in run(env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}).stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--from", "/nowhere"], "cannot read topology '/nowhere'"),
        (["--min-nvlink-version", "0"], "min-nvlink-version"),
        (["--save", "/nowhere/file"], "cannot write '/nowhere/file'"),
    ],
)
def test_bad_input_is_2(arguments: list[str], says: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr


def test_nothing_heavy_is_imported(bridged: Path) -> None:
    code = f"""
import sys
from gammaray.cli import app
try:
    app(["topology", "--from", {str(bridged)!r}])
finally:
    print(sorted({{"torch", "ray", "transformers", "fastapi"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
