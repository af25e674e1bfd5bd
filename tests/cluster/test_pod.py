"""The labels of a pod, from its environment and its GPUs, and the command that it turns into."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.nvml import Library, compiled, fabric, gpus, switched

from gammaray.actors.labels import ISLAND, NODE, POOL
from gammaray.cluster.labels import labelled, labels
from gammaray.cluster.pod import command
from gammaray.cluster.topology import Gpu, Join, Mig, Topology
from gammaray.errors import ConfigError, GammarayError

POD = {"POD_NAME": "demo-h100-abcde", "GAMMARAY_POOL": "h100"}
OWN = {POOL: "h100", NODE: "demo-h100-abcde"}
START = "ray start  --address=head:6379  --block  --labels=gammaray/pool=old,zone=a  --num-gpus=2 "
RAY = """#!{python}
import json, os, resource, sys
files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
print(json.dumps([os.getpid(), files, sys.argv[1:]]))
"""


def gpu(index: int, version: float | None = 4.0) -> Gpu:
    return Gpu(index, f"GPU-{9 - index}1b2c3d4-0000-1111", "H100", nvlink_version=version)


PAIR = Topology("host", (gpu(0), gpu(1)), {(0, 1): Join(18)})
THREE = Topology("host", (gpu(0), gpu(1), gpu(2)), {(0, 1): Join(18), (1, 2): Join(18)})


@pytest.mark.parametrize(
    ("topology", "island"),
    [
        (Topology("host", ()), None),
        (Topology("host", (gpu(0),)), None),  # nothing to be together with
        (PAIR, "GPU-81b2c3d4"),
        (THREE, "GPU-71b2c3d4"),  # 0 and 2 through 1
        (replace(THREE, joins={(0, 1): Join(18)}), None),  # two islands
        (replace(PAIR, joins={(0, 1): Join(pcie="PIX")}), None),
        (replace(PAIR, joins={(0, 1): Join(18, fault="a dead fabric")}), None),
        (replace(PAIR, gpus=(gpu(0, 3.0), gpu(1, 3.0))), "GPU-81b2c3d4"),
        (replace(PAIR, gpus=(gpu(0, None), gpu(1, None))), None),
        (replace(PAIR, gpus=(gpu(0), replace(gpu(1), mig=(Mig("MIG-1", 1),)))), None),
        (replace(PAIR, gpus=tuple(replace(gpu(i), clique=("c1", 7)) for i in (0, 1))), "c1.7"),
    ],
)
def test_one_nvlink_island_is_a_label_several_are_none(topology: Topology, island: str | None) -> None:
    assert labels(topology, POD) == OWN | ({ISLAND: island} if island else {})


def test_two_pods_are_never_of_one_island_by_accident() -> None:
    """Ray would take GPUs of two hosts for linked."""
    other = replace(PAIR, gpus=tuple(replace(gpu(i), uuid=f"GPU-ffff000{i}-0000") for i in (0, 1)))
    assert labels(PAIR, POD)[ISLAND] != labels(other, POD)[ISLAND]


def test_only_the_gpus_that_the_pod_may_use_count() -> None:
    joins = {(0, 1): Join(18)}
    assert ISLAND not in labels(replace(THREE, joins=joins), POD)
    assert ISLAND in labels(replace(THREE, joins=joins), POD | {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_a_node_has_the_name_that_it_was_given() -> None:
    empty = Topology("host", ())
    assert labels(empty, {}) == {NODE: "host"}
    assert labels(empty, POD | {"GAMMARAY_NODE": "rack-1"})[NODE] == "rack-1"


@pytest.mark.parametrize(("name", "value"), [("GAMMARAY_POOL", "a b"), ("GAMMARAY_NODE", "x" * 64)])
def test_what_ray_would_refuse_as_a_label_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{value}.* set {name} "):
        labels(PAIR, {name: value})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ray start --head", ["ray", "start", "--head", "--labels=k=own"]),
        ("ray start --labels=k=theirs,z=1 --block", ["ray", "start", "--block", "--labels=k=own,z=1"]),
        ("ray start --labels k=theirs --block", ["ray", "start", "--block", "--labels=k=own"]),
        ("""ray start --labels='"z=1"'""", ["ray", "start", "--labels=k=own,z=1"]),
        ("""ray start --resources='{"a": 1}'""", ["ray", "start", '--resources={"a": 1}', "--labels=k=own"]),
        (
            "ray start --ip=$IP --x=${IP}0 --y=$NO",
            ["ray", "start", "--ip=1", "--x=10", "--y=", "--labels=k=own"],
        ),
        ("ray start --a='x;y' --b=$NOTE", ["ray", "start", "--a=x;y", "--b=it's a; b", "--labels=k=own"]),
    ],
)
def test_labels_join_those_of_the_command_and_nothing_else_changes(given: str, expected: list[str]) -> None:
    assert labelled(given, {"k": "own"}, {"IP": "1", "NOTE": "it's a; b"}) == expected


def test_without_labels_there_is_no_flag() -> None:
    assert labelled("ray start --block", {}, {}) == ["ray", "start", "--block"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "is not set"),
        ("sh -c x", "expected 'ray start"),
        ("ray start --block && sleep 1", "alone"),  # Ray would be given the words behind it
        ("ray start --block; ray start", "alone"),
        ("ray start '", "cannot be read"),
    ],
)
def test_what_is_no_start_command_stops_with_a_reason(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        command(PAIR, POD | {"KUBERAY_GEN_RAY_START_CMD": given})


def test_a_pod_whose_gpus_are_not_there_does_not_serve_from_its_cpus() -> None:
    none = Topology("host", (), notes=("no GPUs: there is no NVIDIA driver",))
    with pytest.raises(GammarayError, match="has 2 GPUs for Ray, but no GPUs: there is no NVIDIA driver"):
        command(none, POD | {"KUBERAY_GEN_RAY_START_CMD": START})
    with pytest.raises(GammarayError, match="CUDA_VISIBLE_DEVICES hides them"):
        command(PAIR, POD | {"KUBERAY_GEN_RAY_START_CMD": START, "CUDA_VISIBLE_DEVICES": ""})
    for count in ("", "--num-gpus=0"):
        assert command(none, {"KUBERAY_GEN_RAY_START_CMD": f"ray start {count}"})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return compiled(tmp_path_factory.mktemp("driver"))


def run(folder: Path, env: dict[str, str]) -> tuple[int, str, str, int]:
    """Exit code, output, errors and process id of the module, over a `ray` that tells how it was started."""
    (folder / "ray").write_text(RAY.format(python=sys.executable))
    (folder / "ray").chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    process = subprocess.Popen(
        [sys.executable, "-m", "gammaray.cluster.pod"],
        env=env | POD | {"PATH": path, "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors, process.pid


def test_the_process_becomes_ray_and_the_log_says_what_was_found(library: Library, tmp_path: Path) -> None:
    """A child of it would not get SIGTERM; the log is lost when standard output is not flushed before."""
    env = library.environment(switched(2, 18)) | {"KUBERAY_GEN_RAY_START_CMD": START}
    code, output, errors, pid = run(tmp_path, env | {"RAY_START_ULIMIT_OPEN_FILES": "512"})
    *log, last = output.splitlines()
    island = "gammaray/island=GPU-00000000"
    flag = f"--labels={island},gammaray/node=demo-h100-abcde,gammaray/pool=h100,zone=a"
    words = ["start", "--address=head:6379", "--block", "--num-gpus=2", flag]
    assert (code, errors, last) == (0, "", str([pid, 512, words]).replace("'", '"'))
    assert "islands at NVLink >= 0: [0 1]" in log and log[-1].startswith(f"labels: {island}")


def test_without_nvlink_the_log_says_why_there_is_no_island(library: Library, tmp_path: Path) -> None:
    env = library.environment(gpus(2)) | {"KUBERAY_GEN_RAY_START_CMD": START}
    _, output, _, _ = run(tmp_path, env | {"RAY_START_ULIMIT_OPEN_FILES": str(2**40)})
    assert "no direct NVLink" in output and "gammaray/island" not in output
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert f", {hard}, " in output  # no more than this process may have


@pytest.mark.parametrize(
    ("table", "change", "code", "says"),
    [
        (gpus(0), {}, 1, "this pod has 2 GPUs for Ray, but no GPUs"),
        (gpus(2), {"RAY_START_ULIMIT_OPEN_FILES": "many"}, 2, "RAY_START_ULIMIT_OPEN_FILES"),
        (gpus(2), {"KUBERAY_GEN_RAY_START_CMD": ""}, 2, "ray.io/overwrite-container-cmd"),
    ],
)
def test_failures_are_one_line_and_an_exit_code(
    library: Library, tmp_path: Path, table: dict[str, object], change: dict[str, str], code: int, says: str
) -> None:
    env = library.environment(table) | {"KUBERAY_GEN_RAY_START_CMD": START} | change
    found, _, errors, _ = run(tmp_path, env)
    assert (found, len(errors.splitlines())) == (code, 1) and says in errors


def test_topology_prints_the_same_labels(library: Library) -> None:
    env = library.environment(switched(2, 18) | {f"fabric {i}": fabric(cluster=9, clique=3) for i in (0, 1)})
    words = [sys.executable, "-m", "gammaray.cli", "topology", "--labels"]
    done = subprocess.run(words, env=env | POD, capture_output=True, text=True, timeout=60)
    island = "09090909-0909-0909-0909-090909090909.3"
    assert done.stdout == f"gammaray/island={island},gammaray/node=demo-h100-abcde,gammaray/pool=h100\n"


def test_topology_prints_the_labels_of_saved_nodes_whatever_this_one_is(tmp_path: Path) -> None:
    matrix = {"gpu_name": "NVIDIA H100 80GB HBM3", "matrix": [["X", "NV18"], ["NV18", "X"]]}
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(matrix))
    files = [word for name in "ab" for word in ("--from", str(tmp_path / f"{name}.json"))]
    words = [sys.executable, "-m", "gammaray.cli", "topology", "--labels", "--json", *files]
    done = subprocess.run(words, env={**os.environ, **POD}, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == [{NODE: name, ISLAND: f"{name}-0"} for name in "ab"]
