"""The pods of a pool of the chart as nodes: what their values say, and what is assumed of their links."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gammaray.cluster import matrix
from gammaray.cluster.gpus import lookup
from gammaray.cluster.topology import Gpu, Join, Topology, count
from gammaray.errors import ConfigError
from gammaray.validation import explain, path

# Of the product names by which NVIDIA's feature discovery labels nodes: those behind NVSwitch, all to all.
# Not the hybrid cube mesh of V100, nor bridges between PCIe cards, which the name does not tell.
SWITCHED = re.compile(r"A[18]00-SXM|(?<![A-Z])(H[128]00|H20|GB[23]00|B[123]00)(?![0-9])(?!.*(PCIE|NVL))")
LINKS = {3.0: 12}  # of a GPU behind NVSwitch by version of NVLink; newer ones have 18
MIG = re.compile(r"-MIG-\w+\.(\d+)gb", re.IGNORECASE)
QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|[KMGTPE]i?)?")
POWERS = "kMGTPE"


class Pool(BaseModel):
    """What a plan needs of a pool's values; helm checks the others."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    replicas: int = Field(ge=0, le=1000)
    gpus: int = Field(ge=0, le=64)
    accelerator: str
    gpu_memory: str | int | float = Field(alias="gpuMemory")
    resources: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pod:
    """One node of the plan. `cpus` that Ray will count, `memory` in bytes; None: not said."""

    pool: str
    topology: Topology
    cpus: float | None
    memory: float | None


def parse(name: str, values: object) -> Pool:
    """Raises ConfigError with one line a fault."""
    try:
        return Pool.model_validate(values)
    except ValidationError as error:
        faults = [f"pools.{name}.{path(e)}: {explain(e)}" for e in error.errors(include_url=False)]
        raise ConfigError("\n".join(faults)) from None


def quantity(value: object, where: str) -> float:
    """'80Gi' in bytes, '500m' in CPUs. Raises ConfigError that names `where`."""
    if not (found := QUANTITY.fullmatch(str(value))):
        raise ConfigError(f"{where}: expected a quantity such as 80Gi (got {value!r})")
    number, unit = float(found[1]), found[2] or ""
    if unit in ("", "m"):
        return number / 1000 if unit else number
    power = POWERS.replace("k", "K").index(unit[0].upper()) + 1
    return number * math.pow(1024 if unit.endswith("i") else 1000, power)


def pods(name: str, pool: Pool, file: Path | None) -> list[Pod]:
    """`file`: nodes as the pods of this pool see them, in turn; without one, NVLink is as the name says.

    Raises ConfigError when its nodes have another number of GPUs than the pods.
    """
    cpus, memory = (_resource(name, pool, resource) for resource in ("cpu", "memory"))
    seen = _read(name, pool, file) if file else [_assumed(name, pool)]
    return [
        Pod(name, _named(seen[number % len(seen)], f"{name}-{number}"), cpus, memory)
        for number in range(pool.replicas)
    ]


def _resource(name: str, pool: Pool, resource: str) -> float | None:
    value = pool.resources.get(resource)
    return None if value is None else quantity(value, f"pools.{name}.resources.{resource}")


def assumption(name: str, pool: Pool) -> str | None:
    """What a plan without a file takes for granted; None: nothing."""
    if pool.gpus < 2:
        return None
    known = "all GPUs of a pod are taken to be linked by NVSwitch"
    unknown = "no NVLink is counted on between the GPUs of a pod"
    what = known if _switched(pool) else unknown
    called = f"as of {pool.accelerator!r}" if pool.accelerator else "as it names no accelerator"
    return f"pool {name}: {what}, {called}; --topology {name}=FILE tells for certain"


def _switched(pool: Pool) -> bool:
    name = pool.accelerator.upper()
    return bool(SWITCHED.search(name)) and not MIG.search(name)


def _assumed(name: str, pool: Pool) -> Topology:
    model, part = lookup(pool.accelerator), MIG.search(pool.accelerator)
    given = quantity(pool.gpu_memory, f"pools.{name}.gpuMemory") if pool.gpu_memory else None
    memory = int(given) if given else (int(part[1]) * 2**30 if part else model.memory)
    called = pool.accelerator or matrix.UNNAMED
    gpus = [Gpu(i, str(i), called, memory, nvlink_version=model.nvlink) for i in range(pool.gpus)]
    joins = {}
    if _switched(pool) and model.nvlink is not None:
        linked = Join(nvlinks=LINKS.get(model.nvlink, 18))
        joins = dict.fromkeys(combinations(range(pool.gpus), 2), linked)
    return Topology(name, tuple(gpus), joins)


def _read(name: str, pool: Pool, file: Path) -> Sequence[Topology]:
    found = matrix.read(file)
    if any(gpu.name == matrix.UNNAMED for node in found for gpu in node.gpus):
        found = matrix.read(file, pool.accelerator or None)
    for node in found:
        if len(node.gpus) != pool.gpus:
            has, wants = count(len(node.gpus), "GPU"), count(pool.gpus, "GPU")
            raise ConfigError(
                f"{file}: node {node.node} has {has}, but a pod of pool {name} has {wants}: "
                "give the matrix as it is seen in such a pod"
            )
    return found


def _named(topology: Topology, node: str) -> Topology:
    """A pod of its own: no two have a GPU in common."""
    gpus = (
        replace(
            gpu,
            uuid=f"{node}:{gpu.index}",
            mig=tuple(replace(part, uuid=f"{node}:{gpu.index}.{i}") for i, part in enumerate(gpu.mig)),
        )
        for gpu in topology.gpus
    )
    return replace(topology, node=node, gpus=tuple(gpus))
