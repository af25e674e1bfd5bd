"""What can be placed on: GPUs and MIG parts of all nodes, numbered, with their links as bit masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from gammaray.cluster.topology import Gpu, Topology, fabric_islands, islands, linked
from gammaray.errors import ConfigError

USABLE = 0.9  # of a GPU's memory; the rest is for contexts and fragments


@dataclass(frozen=True, slots=True)
class Device:
    node: str
    index: int  # of the GPU, for a part too
    uuid: str
    memory: int | None  # bytes; None: unknown
    part: bool = False  # of a GPU that is split by MIG

    @property
    def room(self) -> float:
        """Bytes that may be used; what is unknown is assumed to suffice."""
        return math.inf if self.memory is None else USABLE * self.memory


@dataclass(frozen=True, slots=True)
class Hardware:
    """Device i is bit i of every mask. `groups` may hold a target together, `near` drafts for each other."""

    topologies: tuple[Topology, ...]
    devices: tuple[Device, ...]
    groups: tuple[int, ...]  # for each device: those of as much memory linked to it, of any NVLink version
    near: tuple[int, ...]  # those linked by the version asked for, also on other nodes of an NVLink fabric
    islands: tuple[int, ...]  # connected through `groups`
    twins: tuple[int, ...]  # for each device: lower ones of its node that it could change places with
    nodes: dict[str, int]  # the devices of each
    shapes: dict[str, int]  # of each node; those of one shape could change places

    def topology(self, node: str) -> Topology:
        return next(topology for topology in self.topologies if topology.node == node)


def hardware(topologies: Sequence[Topology], min_version: float) -> Hardware:
    """Sorted by node name and GPU index. Raises ConfigError when two nodes have one name."""
    ordered = tuple(sorted(topologies, key=lambda topology: topology.node))
    names = [topology.node for topology in ordered]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two topologies are of a node named {twice!r}: give each node its own name")
    devices = tuple(device for topology in ordered for device in _devices(topology))
    at = {(device.node, device.index): i for i, device in enumerate(devices) if not device.part}
    groups = [_linked(at, topology, 0.0) for topology in ordered]
    near = [_linked(at, topology, min_version) for topology in ordered]
    near.append(_across(at, ordered, min_version))
    own = tuple(_alike(devices, i, sum(masks.get(i, 0) for masks in groups)) for i in range(len(devices)))
    close = tuple(sum(masks.get(i, 0) for masks in near) for i in range(len(devices)))
    nodes = {node: mask(i for i, device in enumerate(devices) if device.node == node) for node in names}
    return Hardware(
        ordered,
        devices,
        own,
        close,
        tuple(island for topology in ordered for island in _islands(devices, at, topology)),
        tuple(_twins(devices, own, close, nodes[device.node], i) for i, device in enumerate(devices)),
        nodes,
        _shapes(names, devices, own, close),
    )


def bits(found: int) -> Iterator[int]:
    """Positions of the ones, ascending."""
    while found:
        yield (found & -found).bit_length() - 1
        found &= found - 1


def mask(positions: Iterator[int]) -> int:
    return sum(1 << i for i in positions)


def cliques(hw: Hardware, free: int, size: int) -> Iterator[int]:
    """Groups of `size` devices in `free` that are linked all to all; of groups that are alike, one."""

    def grow(chosen: int, rest: int, missing: int) -> Iterator[int]:
        if missing == 0:
            yield chosen
            return
        for i in bits(rest):
            if not hw.twins[i] & free & ~chosen:  # a twin that was left out would have done as well
                above = rest & hw.groups[i] & ~((2 << i) - 1)
                yield from grow(chosen | 1 << i, above, missing - 1)

    return grow(0, free, size)


def counter(hw: Hardware, size: int) -> Callable[[int], int]:
    """A function: the most groups of `size` that some of the devices of one island hold, none sharing any."""

    @cache
    def most(free: int) -> int:
        bound = free.bit_count() // size
        if size == 1 or bound == 0:
            return bound
        lowest, best = free & -free, 0
        for group in cliques(hw, free, size):
            if not group & lowest:
                break  # groups come in the order of their lowest device
            best = max(best, 1 + most(free & ~group))
            if best == bound:
                return best
        return max(best, most(free ^ lowest))

    return most


def _devices(topology: Topology) -> Iterator[Device]:
    for gpu in sorted(topology.gpus, key=lambda gpu: gpu.index):
        if gpu.mig:
            yield from (Device(topology.node, gpu.index, mig.uuid, mig.memory, True) for mig in gpu.mig)
        else:
            yield Device(topology.node, gpu.index, gpu.uuid, gpu.memory)


def _linked(at: dict[tuple[str, int], int], topology: Topology, min_version: float) -> dict[int, int]:
    found: dict[int, int] = {}
    for a, b in topology.pairs():
        if linked(topology, a, b, min_version):
            i, j = at[topology.node, a], at[topology.node, b]
            found[i], found[j] = found.get(i, 0) | 1 << j, found.get(j, 0) | 1 << i
    return found


def _alike(devices: Sequence[Device], i: int, partners: int) -> int:
    """Shards of a target get one share of each GPU's memory."""
    return mask(j for j in bits(partners) if devices[j].memory == devices[i].memory)


def _across(
    at: dict[tuple[str, int], int], topologies: Sequence[Topology], min_version: float
) -> dict[int, int]:
    """Partners on other nodes: multi-node NVLink."""
    gpus = {(topology.node, gpu.index): gpu for topology in topologies for gpu in topology.gpus}
    found: dict[int, int] = {}
    for fabric in fabric_islands(topologies):
        good = [place for place in fabric if _recent(gpus[place], min_version)]
        for place in good:
            found[at[place]] = mask(at[other] for other in good if other[0] != place[0])
    return found


def _recent(gpu: Gpu, min_version: float) -> bool:
    return gpu.nvlink_version is not None and gpu.nvlink_version >= min_version


def _islands(devices: Sequence[Device], at: dict[tuple[str, int], int], topology: Topology) -> Iterator[int]:
    for island in islands(topology, 0.0):
        if whole := mask(at[topology.node, index] for index in island if (topology.node, index) in at):
            yield whole
    yield from (1 << i for i, device in enumerate(devices) if device.part and device.node == topology.node)


def _twins(devices: Sequence[Device], groups: Sequence[int], near: Sequence[int], node: int, i: int) -> int:
    def alike(j: int) -> bool:
        pair = 1 << i | 1 << j
        links = ((masks[i] | pair) == (masks[j] | pair) for masks in (groups, near))
        return devices[j].memory == devices[i].memory and all(links)

    return mask(j for j in bits(node & (1 << i) - 1) if alike(j))


def _shapes(
    nodes: Sequence[str], devices: Sequence[Device], groups: Sequence[int], near: Sequence[int]
) -> dict[str, int]:
    """Memory and links, position by position; nodes of an NVLink fabric are like none."""
    seen: dict[object, int] = {}
    found = {}
    for node in nodes:
        own = [i for i, device in enumerate(devices) if device.node == node]
        first, inside = min(own, default=0), mask(iter(own))
        single = all(near[i] & ~inside == 0 for i in own)
        key = tuple((devices[i].memory, groups[i] >> first, near[i] >> first) for i in own)
        found[node] = seen.setdefault(key if single else node, len(seen))
    return found
