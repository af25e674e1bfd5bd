"""GPU nodes built by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

from gammaray.cluster.topology import Gpu, Join, PcieClass, Topology

GB = 10**9
Pair = tuple[int, int]


def all_pairs(count: int) -> list[Pair]:
    return list(combinations(range(count), 2))


def node(
    name: str,
    count: int,
    links: Iterable[Pair] = (),
    version: float | None = 4.0,
    memory: int | None = 80 * GB,
    pcie: PcieClass = "SYS",
    faults: Mapping[Pair, str] | None = None,
) -> Topology:
    """`count` GPUs, of which the pairs in `links` have 4 NVLinks."""
    gpus = tuple(Gpu(i, f"GPU-{name}-{i}", "Test GPU", memory, nvlink_version=version) for i in range(count))
    linked, broken = set(links), faults or {}
    joins = {
        pair: Join(4 if pair in linked else 0, pcie=pcie, fault=broken.get(pair)) for pair in all_pairs(count)
    }
    return Topology(name, gpus, joins)
