"""The real nvidia-ml-py, driven by a fake libnvidia-ml.so.1: support/fake_nvml.c, compiled here."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from ctypes import sizeof
from pathlib import Path

import pynvml
import pytest
from support.nvml import GIB, Library, Table, bus, compiled, fabric, gpus, link, switched

from gammaray.cluster import nvml
from gammaray.cluster.fabric import FORMS
from gammaray.cluster.topology import Join, Mig, Topology, excluded, islands, why_not


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return compiled(tmp_path_factory.mktemp("driver"))


def direct(name: str = "NVIDIA H100 80GB HBM3", spell: Callable[[str], str] = str) -> Table:
    """Four GPUs, six links from each to each of the others, no switch."""
    table = gpus(4, name)
    for gpu in range(4):
        table[f"fabric {gpu}"] = fabric(state=0)
        for place, other in enumerate(sorted({0, 1, 2, 3} - {gpu})):
            for number in range(6):
                table |= link(gpu, 6 * place + number, spell(bus(other)), kind=0)
    return table


def counts(topology: Topology) -> set[int]:
    return {join.nvlinks for join in topology.joins.values()}


def test_what_is_read_of_a_gpu(library: Library) -> None:
    topology = library.probe(switched(2, 18))
    assert topology.node == "here"
    assert topology.notes == ()
    gpu = topology.gpus[1]
    assert (gpu.index, gpu.uuid, gpu.name) == (1, "GPU-00000001-0000", "NVIDIA H100 80GB HBM3")
    assert (gpu.memory, gpu.pci_bus, gpu.nvlink_version) == (80 * GIB, "0000:0b:00.0", 4.0)
    assert (gpu.clique, gpu.mig, gpu.fault) == (None, (), None)
    assert topology.joins == {(0, 1): Join(18, "PHB")}


def test_sixteen_gpus_behind_switches(library: Library) -> None:
    """One has two links down: of it and any other the fewer count."""
    table = switched(16, 6, version=2, name="Tesla V100-SXM3-32GB")
    table |= {"state 3 1": "0", "state 3 4": "2"}
    topology = library.probe(table)
    assert islands(topology, 2) == (tuple(range(16)),)
    assert len(topology.joins) == 120
    for pair, join in topology.joins.items():
        assert join.nvlinks == (4 if 3 in pair else 6)
    assert {gpu.nvlink_version for gpu in topology.gpus} == {2.0}
    assert set(excluded(topology, 4).values()) == {
        "6 NVLinks, but of version 2, below 4",
        "4 NVLinks, but of version 2, below 4",
    }


@pytest.mark.parametrize("spell", [str, str.lower, lambda bus: bus[4:], lambda bus: bus[4:].lower()])
def test_four_gpus_linked_directly(library: Library, spell: Callable[[str], str]) -> None:
    topology = library.probe(direct(spell=spell))
    assert counts(topology) == {6}
    assert islands(topology, 4) == ((0, 1, 2, 3),)


def test_a_fabric_that_is_not_there_cannot_spoil_direct_links(library: Library) -> None:
    table = direct() | {f"fabric {gpu}": fabric(state=1) for gpu in range(4)}
    assert excluded(library.probe(table), 4) == {}


def test_links_that_go_elsewhere_join_nobody(library: Library) -> None:
    """A virtual machine has two of four GPUs; on POWER9 links go to the CPU; some have no peer access."""
    table = direct() | {"count 0": "2"}
    assert counts(library.probe(table)) == {6}
    table = gpus(2)
    for gpu in (0, 1):
        table |= link(gpu, 0, "0000:FF:00.0", kind=0) | link(gpu, 1, "0000:EE:00.0", kind=1)
        table |= link(gpu, 2) | {f"peer {gpu} 2": "0"}
    topology = library.probe(table)
    assert topology.joins == {(0, 1): Join(0, "PHB")}
    assert [gpu.fault for gpu in topology.gpus] == [None, None]


def test_pcie_only(library: Library) -> None:
    table = gpus(4, "NVIDIA GeForce RTX 4090")
    levels = {(0, 1): "0", (0, 2): "10", (0, 3): "20", (1, 2): "40", (1, 3): "50"}
    table |= {f"ancestor {a} {b}": level for (a, b), level in levels.items()}
    topology = library.probe(table)
    assert [join.pcie for join in topology.joins.values()] == ["PIX", "PIX", "PXB", "NODE", "SYS", "PHB"]
    assert counts(topology) == {0}
    assert why_not(topology, 1, 3, 4) == "no direct NVLink (PCIe SYS, the link between NUMA nodes)"
    assert topology.notes == ()


@pytest.mark.parametrize(
    ("state", "words"),
    [(0, "6 inactive"), (2, "6 asleep"), (3, "6 with their traffic disabled"), (7, "6 in state 7")],
)
def test_only_active_links_count(library: Library, state: int, words: str) -> None:
    table = switched(2, 6) | {f"state 1 {number}": str(state) for number in range(6)}
    topology = library.probe(table)
    assert counts(topology) == {0}
    reason = f"GPU 1: links are down, or a bridge is missing: none of 6 NVLinks is active ({words})"
    assert why_not(topology, 0, 1, 4) == reason


HEALTHY = 2 << 2 | 2 << 4 | 2 << 6 | 1 << 8 | 1 << 12 | 1 << 14
DEAD = "the NVLink fabric is not healthy"


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({}, None),
        ({"state": 0}, None),
        ({"state": 1}, "the NVLink fabric has not started: look at nvidia-fabricmanager"),
        ({"state": 2}, "the NVLink fabric is still starting: look at nvidia-fabricmanager"),
        ({"state": 9}, "the NVLink fabric is in state 9: look at nvidia-fabricmanager"),
        ({"status": 999}, f"{DEAD}: status 999 (Unknown Error)"),
        ({"status": 3}, f"{DEAD}: status 3 (Not Supported)"),
        ({"summary": 2}, f"{DEAD}: so says its summary"),
        ({"mask": HEALTHY | 1}, None),  # less bandwidth than there should be
        ({"mask": 1 << 2}, f"{DEAD}: route recovery (1)"),
        ({"mask": 1 << 4}, f"{DEAD}: route unhealthy (1)"),
        ({"mask": 1 << 6}, f"{DEAD}: access timeout recovery (1)"),
        ({"mask": 5 << 8}, f"{DEAD}: incorrect configuration (5)"),
        ({"mask": 2 << 12}, f"{DEAD}: no partition assigned (2)"),
    ],
)
def test_active_links_of_a_dead_fabric_do_not_count(
    library: Library, values: dict[str, int], fault: str | None
) -> None:
    topology = library.probe(switched(3, 18) | {"fabric 2": fabric(**values)})
    assert [gpu.fault for gpu in topology.gpus] == [None, None, fault]
    assert counts(topology) == {18}
    assert islands(topology, 4) == (((0, 1), (2,)) if fault else ((0, 1, 2),))
    assert why_not(topology, 1, 2, 4) == (f"GPU 2: {fault}" if fault else "")


def test_structures_have_the_sizes_that_drivers_know() -> None:
    """Of nvml.h; a version holds its size."""
    sizes = {version: sizeof(structure) for structure, version, _ in FORMS}
    assert sizes == {3: 40, 2: 36, 1: 28}
    assert pynvml.nvmlGpuFabricInfo_v3 == 3 << 24 | 40
    assert pynvml.nvmlGpuFabricInfo_v2 == 2 << 24 | 36


@pytest.mark.parametrize("newest", [2, 3])
def test_drivers_that_know_older_forms_of_the_fabric(library: Library, newest: int) -> None:
    table = switched(2, 18) | {"fabric 0": f"{newest} 3 0 0 0 0 2", "fabric 1": f"{newest} 3 0 0 0 16 1"}
    found = [gpu.fault for gpu in library.probe(table).gpus]
    assert found == [f"{DEAD}: so says its summary" if newest == 3 else None, f"{DEAD}: route unhealthy (1)"]


def test_a_fabric_that_cannot_be_read_is_a_fault_with_a_note(library: Library) -> None:
    topology = library.probe(switched(2, 18) | {"fabric 0": 999})
    assert topology.gpus[0].fault == "the state of the NVLink fabric cannot be read (Unknown Error)"
    assert topology.notes == ("GPU 0: GetGpuFabricInfoV: Unknown Error",)
    assert library.probe(switched(2, 18) | {"fabric 0": 3}).gpus[0].fault is None


def test_cliques_of_several_nodes_have_a_cluster(library: Library) -> None:
    table = switched(3, 18, version=7, name="NVIDIA GB200")
    table |= {"fabric 0": fabric(cluster=0xAB, clique=7), "fabric 1": fabric(cluster=0xAB, clique=8)}
    topology = library.probe(table)
    cluster = "abababab-abab-abab-abab-abababababab"
    assert [gpu.clique for gpu in topology.gpus] == [(cluster, 7), (cluster, 8), None]
    assert {gpu.nvlink_version for gpu in topology.gpus} == {5.0}
    assert why_not(topology, 0, 1, 4) == "different partitions of the NVLink fabric"


@pytest.mark.parametrize("answer", ["1", "4", "6", 3, 999])
def test_without_peer_access_no_link_counts(library: Library, answer: str | int) -> None:
    topology = library.probe(switched(2, 18) | {"p2p 0 1": answer})
    reason = why_not(topology, 0, 1, 4)
    assert topology.joins[0, 1].nvlinks == 18 and reason.startswith("18 NVLinks, but ")
    known = {"1": "the chipset does not support it", "4": "a registry key of the driver disables it"}
    assert known.get(str(answer), "the driver does not say wh") in reason
    assert bool(topology.notes) == isinstance(answer, int)


def test_far_ends_that_are_hidden_count_when_peer_access_works(library: Library) -> None:
    """So in some virtual machines."""
    table = switched(2, 18)
    for key in [key for key in table if key.startswith(("end ", "type "))]:
        table[key] = 3 if key.startswith("end ") else "255"
    assert islands(library.probe(table), 4) == ((0, 1),)
    assert islands(library.probe(table | {"p2p 0 1": "5"}), 4) == ((0,), (1,))
    (_, dead) = library.probe(table | {"fabric 1": fabric(state=1)}).gpus
    assert "has not started" in (dead.fault or "")


@pytest.mark.parametrize(
    ("codes", "name", "version"),
    [
        (("6", "6"), "?", 4.0),
        (("7", "7"), "?", 5.0),
        (("5", "5"), "?", 3.1),
        (("4", "3"), "?", 2.2),
        (("99", "99"), "?", None),
        (("6", "99"), "?", None),
        (("99", "99"), "NVIDIA B200", 5),
        ((3, 3), "NVIDIA H100 NVL", 4),
    ],
)
def test_versions_are_codes_or_follow_from_the_name(
    library: Library, codes: tuple[str | int, str | int], name: str, version: float | None
) -> None:
    table = switched(2, 2, name=name)
    for gpu in (0, 1):
        table |= {f"version {gpu} {number}": code for number, code in enumerate(codes)}
    assert {gpu.nvlink_version for gpu in library.probe(table).gpus} == {version}


def mig(table: Table, gpu: int, parts: list[int]) -> Table:
    """`parts`: places of instances among the seven that there may be."""
    table = table | {f"mig {gpu}": "1", f"parts {gpu}": "7"}
    for place in parts:
        number = 100 * (gpu + 1) + place
        table |= {
            f"part {gpu} {place}": "",
            f"uuid {number}": f"MIG-{place}",
            f"memory {number}": str(9 + place),
        }
    return table


def test_mig(library: Library) -> None:
    topology = library.probe(mig(switched(2, 18), 1, [1, 4]))
    assert topology.gpus[1].mig == (Mig("MIG-1", 10), Mig("MIG-4", 13))
    assert topology.gpus[0].mig == ()
    assert topology.joins == {(0, 1): Join(18, "PHB")}
    assert why_not(topology, 0, 1, 4) == "GPU 1 is split by MIG, whose parts have no peer access"
    assert topology.notes == ()


def test_a_gpu_for_mig_without_instances_is_left_out(library: Library) -> None:
    topology = library.probe(mig(switched(3, 18), 1, []))
    assert [gpu.index for gpu in topology.gpus] == [0, 2]
    assert topology.joins.keys() == {(0, 2)}
    assert topology.notes == ("GPU 1 is left out: " + nvml.NO_PARTS,)


def test_a_lost_gpu_costs_no_other(library: Library) -> None:
    table = switched(3, 18) | {"handle 0": 15, "name 1": 999, "memory 2": 999, "state 2 5": 999}
    topology = library.probe(table)
    assert [(gpu.index, gpu.name, gpu.memory) for gpu in topology.gpus] == [
        (1, "unknown GPU", 80 * GIB),
        (2, "NVIDIA H100 80GB HBM3", None),
    ]
    assert topology.joins == {(1, 2): Join(17, "PHB")}
    assert topology.notes == (
        "GPU 0: GetHandleByIndex: GPU is lost",
        "GPU 2: GetNvLinkState: Unknown Error",
        "GPU 1: GetName: Unknown Error",
        "GPU 2: GetMemoryInfo: Unknown Error",
    )


def test_the_order_in_which_links_answer_does_not_matter(library: Library) -> None:
    table = direct()
    expected = library.probe(table)
    numbers = list(range(18))
    random.Random(1).shuffle(numbers)
    shuffled = dict(table)
    for key, value in table.items():
        what, gpu, number = (*key.split(), "", "")[:3]
        if what in ("state", "end", "type", "version", "peer"):
            shuffled[f"{what} {gpu} {numbers[int(number)]}"] = value
    assert library.probe(shuffled) == expected


def numa_folder(folder: Path, with_cpus: str, cpus: dict[int, str]) -> Path:
    (folder / "has_cpu").write_text(with_cpus + "\n")
    for node, numbers in cpus.items():
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(numbers + "\n")
    return folder


def test_numa_nodes_without_cpus_do_not_count(library: Library, tmp_path: Path) -> None:
    """Like a GH200, whose GPU memory is nodes 1 to 8."""
    folder = numa_folder(tmp_path, "0,9", {0: "0-3", 9: "4,6"})
    table = gpus(5) | {
        "nodes 0": hex(0b111111111),
        "nodes 1": hex(1 << 9 | 1),
        "nodes 2": hex(0b110),
        "cpus 2": hex(1 << 6),
        "cpus 3": hex(0b11000),
        "cpus 4": hex(1 << 3),
    }
    assert [gpu.numa for gpu in library.probe(table, folder).gpus] == [0, None, 9, None, 0]
    assert {gpu.numa for gpu in library.probe(table, tmp_path / "none").gpus} == {None}


def test_an_old_driver_without_fabrics_is_no_fault(tmp_path: Path) -> None:
    """Nor without types of far ends, which are hidden then."""
    topology = compiled(tmp_path, "OLD_DRIVER").probe(switched(2, 6, version=4))
    assert (islands(topology, 3), topology.notes) == (((0, 1),), ())
    assert counts(topology) == {6}


def test_a_driver_that_says_nothing_of_peer_access_has_no_link_that_counts(tmp_path: Path) -> None:
    topology = compiled(tmp_path, "WITHOUT_P2P").probe(switched(2, 6))
    assert "does not say whether" in why_not(topology, 0, 1, 4)
    assert topology.notes == ("GPUs 0 and 1: GetP2PStatus: Function Not Found",)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"init 0": 9}, "no GPUs: the NVIDIA driver does not start: Driver Not Loaded"),
        ({"init 0": "", "count 0": "0"}, "no GPUs: the driver shows none that can be used"),
        ({"init 0": "", "count 0": 999}, "no GPUs: the driver shows none that can be used"),
    ],
)
def test_drivers_without_gpus(library: Library, table: Table, says: str) -> None:
    topology = library.probe(table)
    assert (topology.gpus, topology.joins, topology.notes[-1]) == ((), {}, says)


def test_without_a_driver(tmp_path: Path) -> None:
    """A file that is no library hides one that the machine may have."""
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    topology = Library(tmp_path).probe({})
    assert topology.gpus == ()
    assert topology.notes == ("no GPUs: there is no NVIDIA driver: libnvidia-ml.so.1 was not found",)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    topology = nvml.probe()
    assert topology.node and not topology.gpus
    assert topology.notes == ("no GPUs: nvidia-ml-py is not installed: pip install 'gammaray[gpu]'",)
