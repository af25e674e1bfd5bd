"""Which GPUs count as linked, in every given matrix and in made-up ones, and what names and variables say."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from gammaray.cluster.gpus import MIB, lookup, named
from gammaray.cluster.matrix import read
from gammaray.cluster.topology import (
    Gpu,
    Join,
    Mig,
    Topology,
    all_to_all,
    excluded,
    fabric_islands,
    islands,
    linked,
    why_not,
)
from gammaray.cluster.visible import noted, visible


def node(joins: dict[tuple[int, int], Join], count: int, version: float | None = 4.0) -> Topology:
    """`count` GPUs; pairs that are not named are joined by PCIe SYS."""
    gpus = tuple(Gpu(index, f"GPU-{index}", "Some GPU", nvlink_version=version) for index in range(count))
    every = {pair: joins.get(pair, Join(pcie="SYS")) for pair in combinations(range(count), 2)}
    return Topology("here", gpus, every)


def with_gpu(topology: Topology, index: int, **changes: object) -> Topology:
    gpus = (replace(gpu, **changes) if gpu.index == index else gpu for gpu in topology.gpus)  # type: ignore[arg-type]
    return replace(topology, gpus=tuple(gpus))


def apart(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple((index,) for index in range(count))


def whole(count: int) -> tuple[tuple[int, ...], ...]:
    return (tuple(range(count)),)


SYS, PHB = "no direct NVLink (PCIe SYS", "no direct NVLink (PCIe PHB"
GIVEN = {  # file -> islands at versions 4, 3 and 2, and beginnings of every reason at 4
    "a100_4gpu_direct_nv4": (apart(4), whole(4), whole(4), {"4 NVLinks, but of version 3, below 4"}),
    "a100_pcie_one_bridge": (
        apart(4),
        ((0, 1), (2,), (3,)),
        ((0, 1), (2,), (3,)),
        {"12 NVLinks, but of version 3, below 4", SYS, "no direct NVLink (PCIe NODE"},
    ),
    "dgx2_v100_nv6": (apart(16), apart(16), whole(16), {"6 NVLinks, but of version 2, below 4"}),
    "dgx_a100_nv12": (apart(8), whole(8), whole(8), {"12 NVLinks, but of version 3, below 4"}),
    "gb200_tray_nv18": (whole(4), whole(4), whole(4), set()),
    "h100_4gpu_direct_nv6": (whole(4), whole(4), whole(4), set()),
    "hgx_h100_nv18": (whole(8), whole(8), whole(8), set()),
    "rtx4090_phb": (apart(4), apart(4), apart(4), {PHB}),
    "single_gpu": (apart(1), apart(1), apart(1), set()),
    "sxm_8gpu_no_nvlink_seen": (apart(8), apart(8), apart(8), {SYS}),
}


def test_every_given_matrix_is_in_the_table(shared: Path) -> None:
    assert {path.stem for path in (shared / "data" / "topologies").glob("*.json")} == GIVEN.keys()


@pytest.mark.parametrize("name", GIVEN)
def test_a_given_matrix(shared: Path, name: str) -> None:
    (topology,) = read(shared / "data" / "topologies" / f"{name}.json")
    *expected, beginnings = GIVEN[name]
    assert [islands(topology, version) for version in (4, 3, 2)] == expected
    reasons = excluded(topology, 4)
    assert {
        begin for begin in beginnings if any(text.startswith(begin) for text in reasons.values())
    } == beginnings
    assert all(any(text.startswith(begin) for begin in beginnings) for text in reasons.values())
    assert set(reasons) == {pair for pair in topology.pairs() if not linked(topology, *pair, 4)}


def test_boards_whose_links_are_not_seen_say_that_they_may_be_down(shared: Path) -> None:
    (h800,) = read(shared / "data" / "topologies" / "sxm_8gpu_no_nvlink_seen.json")
    (rtx,) = read(shared / "data" / "topologies" / "rtx4090_phb.json")
    assert all("'NVIDIA H800' has NVLink 4" in text for text in excluded(h800, 4).values())
    assert all("links are down" in text for text in excluded(h800, 4).values())
    assert not any("down" in text for text in excluded(rtx, 4).values())


# Faces of the cube (0-3, 4-7) are all-to-all, and each corner is linked to its counterpart.
CUBE = {
    **{pair: Join(1 + (sum(pair) % 2)) for half in (range(4), range(4, 8)) for pair in combinations(half, 2)},
    **{(corner, corner + 4): Join(1) for corner in range(4)},
}


def test_a_hybrid_cube_mesh_is_one_island_but_not_all_to_all() -> None:
    dgx1 = node(CUBE, 8, version=2.0)
    assert islands(dgx1, 2) == whole(8)
    assert all_to_all(dgx1, range(4), 2) and all_to_all(dgx1, (1, 5), 2) and all_to_all(dgx1, (3,), 2)
    assert not all_to_all(dgx1, (0, 1, 5), 2) and not linked(dgx1, 0, 5, 2)
    assert len(excluded(dgx1, 2)) == 12
    assert why_not(dgx1, 5, 0, 2) == (
        "no direct NVLink (PCIe SYS, the link between NUMA nodes); NVLink joins them only through other GPUs"
    )
    assert islands(dgx1, 3) == apart(8)


@pytest.mark.parametrize(
    ("changes", "join", "says"),
    [
        ({}, Join(3), ""),
        ({"nvlink_version": 3.0}, Join(3), "3 NVLinks, but of version 3, below 4"),
        ({"nvlink_version": 3.1}, Join(1), "1 NVLink, but of version 3.1, below 4"),
        ({"nvlink_version": None}, Join(3), "the NVLink version of 'Some GPU' is unknown: give --gpu-name"),
        ({}, Join(3, fault="no peer access: why"), "3 NVLinks, but no peer access: why"),
        ({}, Join(fault="links are down"), "links are down"),
        ({"fault": "fabric is dead"}, Join(3), "GPU 1: fabric is dead"),
        ({"mig": (Mig("MIG-1", 1),)}, Join(3), "GPU 1 is split by MIG, whose parts have no peer access"),
        ({"mig": (Mig("MIG-1", 1),), "fault": "dead"}, Join(3), "MIG"),
        ({}, Join(), "what joins them is unknown"),
    ],
)
def test_one_reason_after_another(changes: dict[str, object], join: Join, says: str) -> None:
    topology = with_gpu(node({(0, 1): join}, 2), 1, **changes)
    reason = why_not(topology, 0, 1, 4)
    assert says in reason and bool(reason) == bool(says)
    assert why_not(topology, 1, 0, 4) == reason
    assert linked(topology, 0, 1, 4) is not bool(says)
    assert islands(topology, 4) == (apart(2) if says else whole(2))


def test_what_holds_for_both_gpus_is_said_once() -> None:
    pair = node({(0, 1): Join(3)}, 2)
    for index in (0, 1):
        pair = with_gpu(pair, index, fault="fabric is dead")
    assert why_not(pair, 0, 1, 4) == "both: fabric is dead"
    pair = with_gpu(pair, 0, fault="links are down")
    assert why_not(pair, 0, 1, 4) == "GPU 0: links are down; GPU 1: fabric is dead"


def test_indices_may_have_gaps_and_any_order() -> None:
    gpus = tuple(Gpu(index, str(index), "x", nvlink_version=4) for index in (7, 2, 5))
    topology = Topology("here", gpus, {(2, 7): Join(1), (2, 5): Join(), (5, 7): Join()})
    assert islands(topology, 4) == ((2, 7), (5,))
    assert linked(topology, 7, 2, 4)
    with pytest.raises(KeyError):
        topology.gpu(0)


def test_islands_join_when_a_late_link_joins_them() -> None:
    chain = node({(0, 3): Join(1), (1, 2): Join(1), (2, 3): Join(1)}, 5)
    assert islands(chain, 4) == ((0, 1, 2, 3), (4,))


def tray(name: str, cliques: list[tuple[str, int] | None]) -> Topology:
    topology = node(dict.fromkeys(combinations(range(len(cliques)), 2), Join(18)), len(cliques), 5.0)
    for index, clique in enumerate(cliques):
        topology = with_gpu(topology, index, clique=clique)
    return replace(topology, node=name)


def test_fabrics_join_nodes_of_one_cluster_and_clique() -> None:
    a, b, c = tray("a", [("u", 1), ("u", 1)]), tray("b", [("u", 1), ("u", 2)]), tray("c", [("v", 1), None])
    assert fabric_islands([b, a, c]) == ((("a", 0), ("a", 1), ("b", 0)),)
    assert fabric_islands([a, c]) == ()
    assert fabric_islands([with_gpu(with_gpu(a, 0, fault="x"), 1, mig=(Mig("m", 1),)), b]) == ()
    for cliques in ([("u", 1), ("u", 2)], [("u", 1), ("v", 1)]):
        assert why_not(tray("b", cliques), 0, 1, 4) == "different partitions of the NVLink fabric"


@pytest.mark.parametrize(
    ("name", "version", "mebibytes"),
    [
        ("Tesla P100-SXM2-16GB", 1, 16056),
        ("Tesla V100-SXM3-32GB", 2, 32112),
        ("NVIDIA A100-SXM4-40GB", 3, 40140),
        ("NVIDIA A100 80GB PCIe", 3, 80281),
        ("A100", 3, 40536),
        ("NVIDIA A800-SXM4-80GB", 3, 80281),
        ("NVIDIA A30", 3, 24258),
        ("NVIDIA A40", 3, 46068),
        ("NVIDIA RTX A6000", 3, 49140),
        ("NVIDIA GeForce RTX 3090", 3, 24268),
        ("NVIDIA H100 80GB HBM3", 4, 80281),
        ("NVIDIA H100 NVL", 4, 95830),
        ("h100", 4, 81559),
        ("NVIDIA H800", 4, 81559),
        ("NVIDIA H200", 4, 143771),
        ("NVIDIA H20", 4, 97871),
        ("NVIDIA GH200 480GB", 4, 97871),
        ("NVIDIA GH200 120GB", 4, 97871),
        ("NVIDIA GH200 144G HBM3e", 4, 145920),
        ("NVIDIA B200", 5, 183359),
        ("NVIDIA B300 SXM6 AC", 5, 275040),
        ("NVIDIA GB200", 5, 189471),
        ("NVIDIA GB300", 5, 284208),
        ("NVIDIA GeForce RTX 4090", None, 24564),
        ("NVIDIA L40S", None, 46068),
        ("NVIDIA A10", None, 23028),
        ("Some H1000 24GB", None, 24084),
        ("Some GPU", None, None),
        (f"H100 {'9' * 400}GB", 4, 81559),
    ],
)
def test_names(name: str, version: float | None, mebibytes: int | None) -> None:
    model = lookup(name)
    assert (model.nvlink, model.memory) == (version, mebibytes and mebibytes * MIB)


def test_a_given_name_comes_before_the_old_one_but_measured_memory_stays() -> None:
    topology = node({(0, 1): Join(3)}, 2, version=None)
    topology = with_gpu(topology, 0, memory=5)
    first, second = named(topology, "NVIDIA H100").gpus
    assert (first.name, first.nvlink_version, first.memory) == ("NVIDIA H100", 4, 5)
    assert second.memory == 81559 * MIB
    assert named(node({}, 1, version=3.0), "Mystery").gpus[0].nvlink_version == 3.0


MACHINE = Topology(
    "here",
    (
        Gpu(0, "GPU-aa00", "x"),
        Gpu(1, "GPU-ab00", "x", mig=(Mig("MIG-10", 1), Mig("MIG-11", 2), Mig("MIG-20", 3))),
        Gpu(2, "GPU-bb00", "x"),
    ),
    {(0, 1): Join(1), (0, 2): Join(2), (1, 2): Join(3)},
)


@pytest.mark.parametrize(
    ("value", "indices", "pairs"),
    [
        (None, [0, 1, 2], {(0, 1), (0, 2), (1, 2)}),
        ("", [], set()),
        ("-1", [], set()),
        ("2,0", [2, 0], {(0, 2)}),
        (" 2 , 01", [2, 1], {(1, 2)}),
        ("0,9,2", [0], set()),
        ("0,-1,2", [0], set()),
        ("GPU-bb00,GPU-aa", [2, 0], {(0, 2)}),
        ("GPU-a", [], set()),
        ("gpu-bb00", [], set()),
        ("0,0", [0], set()),
        ("MIG-20", [1], set()),
        ("MIG-1", [], set()),
    ],
)
def test_visible(value: str | None, indices: list[int], pairs: set[tuple[int, int]]) -> None:
    left = visible(MACHINE, {} if value is None else {"CUDA_VISIBLE_DEVICES": value})
    assert [gpu.index for gpu in left.gpus] == indices
    assert left.joins.keys() == pairs


def test_visible_parts_of_one_gpu() -> None:
    (gpu,) = visible(MACHINE, {"CUDA_VISIBLE_DEVICES": "MIG-20,MIG-10"}).gpus
    assert [part.uuid for part in gpu.mig] == ["MIG-20", "MIG-10"]


def test_a_note_says_what_is_hidden() -> None:
    assert noted(MACHINE, {}) is MACHINE
    found = noted(MACHINE, {"CUDA_VISIBLE_DEVICES": "2,7,1"})
    assert found.gpus == MACHINE.gpus
    assert found.notes == (
        "CUDA_VISIBLE_DEVICES: '7' fits no GPU here, or several; it and the rest are hidden",
        "CUDA_VISIBLE_DEVICES leaves this process of these GPUs: 2",
    )
