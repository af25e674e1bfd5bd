"""GPUs of one node and what joins them: pure values, and the questions that placement asks of them.

`nvml.py` reads them from the driver, `matrix.py` from a saved file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

PcieClass = Literal["PIX", "PXB", "PHB", "NODE", "SYS"]  # of nvidia-smi, the nearest first


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
    joins: Mapping[tuple[int, int], Join] = field(default_factory=dict)
