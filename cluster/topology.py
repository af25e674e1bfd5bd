"""GPUs of one node and what joins them: pure values, and the questions that placement asks of them.

`nvml.py` reads them from the driver, `matrix.py` from a saved file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

PcieClass = Literal["PIX", "PXB", "PHB", "NODE", "SYS"]  # of nvidia-smi, the nearest first
Pair = tuple[int, int]  # indices of two GPUs, the lower first
PCIE: Mapping[PcieClass, str] = {
    "PIX": "one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "the CPU's PCIe host bridge",
    "NODE": "PCIe host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
}


@dataclass(frozen=True, slots=True)
class Mig:
    """A part of a GPU. Parts have no peer access, so one never pairs with another over NVLink."""

    uuid: str
    memory: int  # bytes


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU, as the driver sees it, whatever CUDA_VISIBLE_DEVICES says."""

    index: int
    uuid: str
    name: str
    memory: int | None = None  # bytes; None: unknown
    numa: int | None = None
    pci_bus: str | None = None
    nvlink_version: float | None = None  # 1.0 (P100) to 5.0 (B200); None: unknown, or it has none
    clique: tuple[str, int] | None = None  # (clusterUuid, cliqueId) of a multi-node NVLink fabric
    mig: tuple[Mig, ...] = ()  # not empty: only these can be used
    fault: str | None = None  # why its links do not count, in words


@dataclass(frozen=True, slots=True)
class Join:
    """What joins two GPUs of a node."""

    nvlinks: int = 0  # direct and healthy ones, also through switches
    pcie: PcieClass | None = None  # None: unknown
    fault: str | None = None  # why NVLinks that are there do not count, in words


@dataclass(frozen=True, slots=True)
class Topology:
    """One node. `joins` has every pair (a, b) of indices with a < b."""

    node: str
    gpus: tuple[Gpu, ...]
    joins: Mapping[Pair, Join] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what could not be read or used, in words

    def gpu(self, index: int) -> Gpu:
        """Raises KeyError when the node has no such GPU; indices may have gaps."""
        for gpu in self.gpus:
            if gpu.index == index:
                return gpu
        raise KeyError(index)

    def join(self, a: int, b: int) -> Join:
        """In either order; a pair that nothing is known of has nothing."""
        return self.joins.get((min(a, b), max(a, b)), Join())

    def pairs(self) -> list[Pair]:
        return list(combinations(sorted(gpu.index for gpu in self.gpus), 2))


def count(number: int, noun: str) -> str:
    """'1 GPU', '2 GPUs'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str) -> str:
    """One line that a terminal shows as it is: no line breaks, no escape codes, no lone surrogates."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def linked(topology: Topology, a: int, b: int, min_version: float) -> bool:
    """Whether a direct and healthy NVLink of a known version >= `min_version` joins GPUs a and b."""
    return _obstacle(topology, a, b, min_version) is None


def all_to_all(topology: Topology, gpus: Iterable[int], min_version: float) -> bool:
    """Whether every two of `gpus` are linked; so is one alone."""
    return all(linked(topology, a, b, min_version) for a, b in combinations(gpus, 2))


def islands(topology: Topology, min_version: float) -> tuple[tuple[int, ...], ...]:
    """Connected components of linked pairs, sorted. Each GPU is in one.

    Two GPUs of an island need not be linked themselves: see the hybrid cube mesh of DGX-1.
    """
    parent = {gpu.index: gpu.index for gpu in topology.gpus}
    for a, b in topology.pairs():
        if linked(topology, a, b, min_version):
            low, high = sorted((parent[a], parent[b]))
            parent = {index: low if root == high else root for index, root in parent.items()}
    members = defaultdict(list)
    for index in sorted(parent):
        members[parent[index]].append(index)
    return tuple(sorted(tuple(island) for island in members.values()))


def why_not(topology: Topology, a: int, b: int, min_version: float) -> str:
    """Why GPUs a and b are not linked, in words; '' when they are."""
    reason = _obstacle(topology, a, b, min_version)
    if reason is None:
        return ""
    wired = any(join.nvlinks for join in topology.joins.values())
    if wired and topology.join(a, b).nvlinks == 0 and _together(islands(topology, min_version), a, b):
        return f"{reason}; NVLink joins them only through other GPUs"
    return reason


def excluded(topology: Topology, min_version: float) -> dict[Pair, str]:
    """Every pair that is not linked, and why not."""
    reasons = {(a, b): why_not(topology, a, b, min_version) for a, b in topology.pairs()}
    return {pair: reason for pair, reason in reasons.items() if reason}


def fabric_islands(topologies: Sequence[Topology]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """(node, GPU) of each NVLink fabric that reaches several nodes, sorted (multi-node NVLink, as in NVL72).

    Nodes are joined through GPUs of equal cluster UUID and clique id. GPUs with a fault, or split by MIG,
    are in none.
    """
    cliques: defaultdict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for topology in topologies:
        for gpu in topology.gpus:
            if gpu.clique and not gpu.fault and not gpu.mig:
                cliques[gpu.clique].append((topology.node, gpu.index))
    several = (found for found in cliques.values() if len({node for node, _ in found}) > 1)
    return tuple(sorted(tuple(sorted(found)) for found in several))


def _obstacle(topology: Topology, a: int, b: int, min_version: float) -> str | None:
    """The first of the reasons why the pair is not linked."""
    first, second, join = topology.gpu(a), topology.gpu(b), topology.join(a, b)
    if reason := _of_gpus(first, second):
        return reason
    if join.fault:
        return f"{count(join.nvlinks, 'NVLink')}, but {join.fault}" if join.nvlinks else join.fault
    if join.nvlinks == 0:
        return _nothing(topology, first, second, join)
    return _of_version(first, second, join.nvlinks, min_version)


def _of_gpus(first: Gpu, second: Gpu) -> str | None:
    if split := [gpu.index for gpu in (first, second) if gpu.mig]:
        return f"{_name(split)} split by MIG, whose parts have no peer access"
    if first.fault or second.fault:
        if first.fault == second.fault:
            return f"both: {first.fault}"
        return "; ".join(f"GPU {gpu.index}: {gpu.fault}" for gpu in (first, second) if gpu.fault)
    if first.clique and second.clique and first.clique != second.clique:
        return "different partitions of the NVLink fabric"
    return None


def _nothing(topology: Topology, first: Gpu, second: Gpu, join: Join) -> str:
    """No NVLink: by design, or where the model would let one expect some."""
    road = f"PCIe {join.pcie}, {PCIE[join.pcie]}" if join.pcie else "what joins them is unknown"
    reason = f"no direct NVLink ({road})"
    if first.nvlink_version is None or second.nvlink_version is None:
        return reason
    if any(join.nvlinks for pair, join in topology.joins.items() if {*pair} & {first.index, second.index}):
        return reason
    missing = "none is seen: links are down or hidden, or a bridge is missing"
    return f"{reason}; {first.name!r} has NVLink {first.nvlink_version:g}, but {missing}"


def _of_version(first: Gpu, second: Gpu, nvlinks: int, min_version: float) -> str | None:
    """A version nobody knows does not count: the drafter then shares the target's GPU, which always works."""
    for gpu in (first, second):
        if gpu.nvlink_version is None:
            unknown = f"the NVLink version of {gpu.name!r} is unknown: give --gpu-name"
            return f"{count(nvlinks, 'NVLink')}, but {unknown}"
    version = min(gpu.nvlink_version for gpu in (first, second) if gpu.nvlink_version is not None)
    if version >= min_version:
        return None
    return f"{count(nvlinks, 'NVLink')}, but of version {version:g}, below {min_version:g}"


def _together(found: Iterable[tuple[int, ...]], a: int, b: int) -> bool:
    return any(a in island and b in island for island in found)


def _name(indices: Sequence[int]) -> str:
    return f"GPU {indices[0]} is" if len(indices) == 1 else f"GPUs {indices[0]} and {indices[1]} are"
