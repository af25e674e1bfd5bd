"""Topologies from files: what nvidia-smi prints in its many shapes, our JSON, and clear errors."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.cluster import saved
from gammaray.cluster.matrix import read, read_all
from gammaray.cluster.topology import Gpu, Join, Mig, Topology, islands
from gammaray.errors import ConfigError

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
TABS = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-47,96-143\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tPHB\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU2\tSYS\tPHB\t X \tSYS\t48-95,144-191\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\t X \t\n"
)
OLD_DRIVER = (
    "\tGPU0\tGPU1\tGPU2\tmlx4_0\tCPU Affinity\n"
    "GPU0\t X \t  NV18\t SYS\t PIX\t0-47\n"
    "GPU1\tNV18\t X \tPHB\tSOC\t0-47\n"
    "GPU2\tSOC\tPHB\t X \tSOC\t48-95\n"
    "mlx4_0\tPIX\tSOC\tSOC\t X \t\n"
)
WITHOUT_NUMA_ID = (
    "GPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\r\n"
    "GPU0\t X \tNV18\tSYS\t0-47\t0\r\n"
    "GPU1\tNV18\t X \tPHB\t0-47\t0-1\r\n"
    "GPU2\tSYS\tPHB\t X \tN/A\tN/A\r\n"
)
RUN_TOGETHER = (  # as a terminal copies it: the cells of NIC0 and NIC1 touch
    "        GPU0    GPU1    GPU2    NIC0    NIC1    CPU Affinity    NUMA Affinity   GPU NUMA ID\n"
    "GPU0     X      NV18    SYS     NODENODE    0-55,112-167    0               N/A\n"
    "GPU1    NV18     X      PHB     NODEPIX     0-55,112-167    0               N/A\n"
    "GPU2    SYS     PHB      X      SYS     SYS 56-111,168-223  1               N/A\n"
)
JOINS = {(0, 1): Join(18), (0, 2): Join(pcie="SYS"), (1, 2): Join(pcie="PHB")}


@pytest.mark.parametrize(
    ("text", "numa"),
    [
        (TABS, [0, 0, 1]),
        (TABS.expandtabs(), [0, 0, 1]),
        (f"$ nvidia-smi topo -m\n{TABS}", [0, 0, 1]),
        (OLD_DRIVER, [None, None, None]),
        (WITHOUT_NUMA_ID, [0, None, None]),
        (RUN_TOGETHER, [0, 0, 1]),
    ],
)
def test_text_of_nvidia_smi(tmp_path: Path, text: str, numa: list[int | None]) -> None:
    file = tmp_path / "box.txt"
    file.write_text(text + LEGEND)
    (topology,) = read(file, "NVIDIA H100 80GB HBM3")
    assert (topology.node, topology.joins) == ("box", JOINS)
    assert [gpu.index for gpu in topology.gpus] == [0, 1, 2]
    assert [gpu.numa for gpu in topology.gpus] == numa
    assert {(gpu.name, gpu.nvlink_version) for gpu in topology.gpus} == {("NVIDIA H100 80GB HBM3", 4)}
    assert islands(topology, 4) == ((0, 1), (2,))


def test_text_names_no_gpu_so_its_version_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "box"
    file.write_text(TABS)
    (topology,) = read(file)
    assert {(gpu.name, gpu.nvlink_version, gpu.memory) for gpu in topology.gpus} == {
        ("unknown GPU", None, None)
    }
    assert islands(topology, 1) == ((0,), (1,), (2,))


def test_one_gpu_and_some_of_many(tmp_path: Path) -> None:
    file = tmp_path / "one"
    file.write_text("\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPHB\t0-251\t0\nNIC0\tPHB\t X \n")
    (topology,) = read(file)
    assert (len(topology.gpus), topology.gpus[0].numa, topology.joins) == (1, 0, {})
    file.write_text("\tGPU2\tGPU5\nGPU2\tX\tPIX\nGPU5\tPIX\tX\n")
    (topology,) = read(file)
    assert topology.joins == {(2, 5): Join(pcie="PIX")}


MATRIX = {"gpu_name": "NVIDIA H100", "matrix": [["X", "NV6"], ["NV6", "X"]], "numa": [0, 1]}


def write(tmp_path: Path, data: object, name: str = "box.json") -> Path:
    (tmp_path / name).write_text(data if isinstance(data, str) else json.dumps(data))
    return tmp_path / name


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
@pytest.mark.parametrize("text", [TABS, json.dumps(MATRIX)])
def test_files_with_a_byte_order_mark(tmp_path: Path, encoding: str, text: str) -> None:
    """PowerShell writes UTF-16."""
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / "box").write_bytes((mark + text).encode(encoding))
    assert read(tmp_path / "box")[0].joins


@pytest.mark.parametrize("several", [[MATRIX, MATRIX], {"nodes": [MATRIX, MATRIX]}])
def test_several_nodes_in_one_file(tmp_path: Path, several: object) -> None:
    nodes = read(write(tmp_path, several))
    assert [topology.node for topology in nodes] == ["box", "box-2"]
    assert len({gpu.uuid for topology in nodes for gpu in topology.gpus}) == 4
    assert [gpu.numa for gpu in nodes[1].gpus] == [0, 1]


def test_names_of_nodes_are_unique_across_files(tmp_path: Path) -> None:
    file = write(tmp_path, MATRIX)
    other = write(tmp_path, [MATRIX | {"node": "box-2"}, MATRIX | {"node": "rack"}], "other.json")
    assert [topology.node for topology in read_all([other, file, file])] == ["box-2", "rack", "box", "box-3"]
    assert [topology.node for topology in read_all([file, other, file])] == ["box", "box-2", "rack", "box-3"]


def test_names_do_not_depend_on_the_order_of_files(tmp_path: Path) -> None:
    other = {"gpu_name": "NVIDIA B200", "matrix": [["X"]]}
    for folder, data in (("a", MATRIX), ("b", other)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, data)
    files = [tmp_path / folder / "box.json" for folder in "ab"]
    found = [topology.node for topology in read_all(files)]
    assert found == ["box", "box-2"] == [topology.node for topology in read_all(files[::-1])][::-1]


def test_the_given_name_comes_before_the_file_s(tmp_path: Path) -> None:
    file = write(tmp_path, MATRIX)
    assert {gpu.nvlink_version for gpu in read(file)[0].gpus} == {4}
    assert {gpu.nvlink_version for gpu in read(file, "Tesla V100-SXM2-16GB")[0].gpus} == {2}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("", "no line names the columns GPU0, GPU1"),
        ("hello GPU0\n", "no line names the columns"),
        ("GPU0\tX\tNV4\nGPU1\tNV4\tX\n", "no line names the columns"),
        ("\tGPU0\tGPU1\nGPU0\tX\tPIX\n", "rows GPU0, but columns GPU0 GPU1"),
        ("\tGPU0\tGPU1\n", "rows none, but columns GPU0 GPU1"),
        ("\tGPU0\nGPU0\tX\nGPU1\tPIX\n", "rows GPU0 GPU1, but columns GPU0"),
        ("\tGPU0\tGPU1\nGPU0\tX\tPIX\nGPU1\tPIX\n", "row GPU1 ends before column GPU1"),
        ("\tGPU0\tGPU1\nGPU0\tX\tFOO\nGPU1\tFOO\tX\n", "row GPU0, column GPU1: expected NV and a number"),
        (
            "\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tSYS\tX\n",
            "row GPU1, column GPU0: 'SYS', but 'NV4' the other way round",
        ),
        ("{", "line 1: not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "holds no node"),
        ({"nodes": []}, "holds no node"),
        ([3], "expected a topology with `matrix` or `joins`"),
        ({}, "expected a topology with `matrix` or `joins`"),
        ({"matrix": 3}, "matrix: expected a list of rows"),
        ({"matrix": [3]}, "matrix: expected a list of rows"),
        ({"matrix": [["X", "PIX"]]}, "row 0: expected as many cells as rows, 1 (got 2)"),
        ({"matrix": [["X", "PIX"], ["PIX"]]}, "row 1: expected as many cells as rows, 2 (got 1)"),
        ({"matrix": [["Y" * 100_000]]}, "(got 'YYY"),
        ({"matrix": [["X", "NV0"], ["NV0", "X"]]}, "column GPU1: expected NV and a number"),
        ({"matrix": [["X", 4], [4, "X"]]}, "(got 4)"),
        ({"matrix": [["PIX"]]}, "row GPU0, column GPU0: expected X (got 'PIX')"),
        ({"matrix": [["X", "X"], ["X", "X"]]}, "row GPU0, column GPU1: expected NV and a number"),
        (MATRIX | {"numa": [0]}, "numa: expected one number for each row, 2 in all"),
        (MATRIX | {"numa": ["0", "1"]}, "numa: expected a list of numbers"),
        (MATRIX | {"gpu_name": 3}, "gpu_name: expected a text (got 3)"),
        ({"joins": [], "gpus": [{"index": 0}]}, "gpus[0].uuid: Field required"),
        ({"joins": [{"pair": [0, 1], "pcie": "PCI"}], "gpus": []}, "joins[0].pcie"),
    ],
)
def test_bad_files(tmp_path: Path, data: object, says: str) -> None:
    file = write(tmp_path, data)
    with pytest.raises(ConfigError) as raised:
        read(file)
    assert says in str(raised.value)
    assert str(file) in str(raised.value)
    assert len(str(raised.value)) < 500


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read topology '.*none': No such file"):
        read(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        read(tmp_path / "binary")
    with pytest.raises(ConfigError, match="cannot write"):
        saved.save([Topology("a", ())], tmp_path / "none" / "file")


TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
BYTES = st.integers(1, 2**40)


@st.composite
def topologies(draw: st.DrawFn, name: str = "here") -> Topology:
    indices = sorted(draw(st.sets(st.integers(0, 20), max_size=4)))
    gpu = st.builds(
        Gpu,
        index=st.just(0),
        uuid=TEXT,
        name=TEXT,
        memory=st.none() | BYTES,
        numa=st.none() | st.integers(0, 9),
        pci_bus=st.none() | TEXT,
        nvlink_version=st.none() | st.sampled_from([1.0, 2.2, 4.0]),
        clique=st.none() | st.tuples(TEXT, st.integers(0, 2**32 - 1)),
        mig=st.lists(st.builds(Mig, TEXT, BYTES), max_size=2).map(tuple),
        fault=st.none() | TEXT,
    )
    join = st.builds(
        Join,
        nvlinks=st.integers(0, 18),
        pcie=st.none() | st.sampled_from(["PIX", "PXB", "PHB", "NODE", "SYS"]),
        fault=st.none() | TEXT,
    )
    gpus = tuple(_with_uuids(index, draw(gpu)) for index in indices)
    joins = {pair: draw(join) for pair in combinations(indices, 2)}
    return Topology(name, gpus, joins, tuple(draw(st.lists(TEXT, max_size=2))))


def _with_uuids(index: int, gpu: Gpu) -> Gpu:
    """No two alike: they end with the index, and those of parts with their place."""
    parts = tuple(replace(part, uuid=f"{part.uuid}-{place}-{index}") for place, part in enumerate(gpu.mig))
    return replace(gpu, index=index, uuid=f"{gpu.uuid}-{index}", mig=parts)


@given(nodes=st.tuples(topologies("a"), topologies("b")), count=st.integers(1, 2))
def test_what_is_saved_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, nodes: tuple[Topology, Topology], count: int
) -> None:
    file = tmp_path_factory.mktemp("saved") / "file.json"
    saved.save(nodes[:count], file)
    assert read(file) == list(nodes[:count])


def with_first(**change: object) -> dict[str, object]:
    """SAVED with a changed first GPU."""
    return {"gpus": [SAVED["gpus"][0] | change, SAVED["gpus"][1]]}


SAVED = saved.dump(Topology("a", (Gpu(0, "u", "x"), Gpu(1, "v", "x")), {(0, 1): Join(4)}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"joins": [{"pair": [1, 0]}]}, "joins[0].pair: expected two indices of `gpus`, the lower first"),
        ({"joins": [{"pair": [0, 2]}]}, "joins[0].pair"),
        ({"joins": [{"pair": [0, 1], "nvlinks": -1}]}, "joins[0].nvlinks: expected 0 or more (got -1)"),
        ({"gpus": [SAVED["gpus"][0], SAVED["gpus"][0]]}, "gpus: index 0 appears twice"),
        ({"joins": [{"pair": [0, 1]}, {"pair": [0, 1]}]}, "joins: pair [0, 1] appears twice"),
        ({"joins": [{"pair": [False, True]}]}, "joins[0].pair[0]: Input should be a valid integer"),
        (with_first(nvlink_version=math.nan), "gpus[0].nvlink_version: expected a number above 0"),
        (with_first(nvlink_version=-4), "gpus[0].nvlink_version: expected a number above 0"),
        (with_first(nvlink_version=True), "gpus[0].nvlink_version: Input should be a valid number"),
        (with_first(index=-1), "gpus[0].index: expected 0 or more (got -1)"),
        (with_first(index=2.0), "gpus[0].index: Input should be a valid integer"),
        (with_first(index=False), "gpus[0].index: Input should be a valid integer"),
        (with_first(memory=0), "gpus: memory: expected bytes"),
        (with_first(memory=10**400), "gpus: memory: expected bytes"),
        (with_first(mig=[{"uuid": "m", "memory": -1}]), "gpus: memory: expected bytes"),
        (with_first(uuid="v"), "gpus: uuid 'v' appears twice"),
        (with_first(mig=[{"uuid": "v", "memory": 1}]), "gpus: uuid 'v' appears twice"),
    ],
)
def test_bad_saved_files(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        saved.load(SAVED | change, "file")
    assert str(raised.value).startswith(f"file: {says}")


def test_a_saved_file_may_leave_out_pairs() -> None:
    assert saved.load(SAVED | {"joins": []}, "file").joins == {(0, 1): Join()}
