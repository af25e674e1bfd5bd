"""A topology as JSON: what `gammaray topology --save` writes, and `--json` prints among other things."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gammaray.cluster.topology import Gpu, Join, Pair, PcieClass, Topology
from gammaray.errors import ConfigError
from gammaray.validation import explain, path


@dataclass(frozen=True, slots=True)
class _Joined:
    pair: Pair
    nvlinks: int = 0
    pcie: PcieClass | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class _Node:
    node: str
    gpus: tuple[Gpu, ...]
    joins: tuple[_Joined, ...]
    notes: tuple[str, ...] = ()


NODE = TypeAdapter(_Node)


def dump(topology: Topology) -> dict[str, Any]:
    """JSON needs names for keys, so each pair becomes an entry of a list."""
    return {
        "node": topology.node,
        "gpus": [asdict(gpu) for gpu in topology.gpus],
        "joins": [{"pair": list(pair), **asdict(join)} for pair, join in topology.joins.items()],
        "notes": list(topology.notes),
    }


def save(topologies: Sequence[Topology], file: Path) -> None:
    """Raises ConfigError when `file` cannot be written."""
    nodes = [dump(topology) for topology in topologies]
    data = nodes[0] if len(nodes) == 1 else {"nodes": nodes}
    try:
        file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write '{file}': {error.strerror or error}") from None


def load(data: object, source: str) -> Topology:
    """The inverse of `dump`; unknown keys are ignored. Raises ConfigError that names `source`."""
    try:
        node = NODE.validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{source}: {path(first)}: {explain(first)}") from None
    _check(node, source)
    joins = {joined.pair: Join(joined.nvlinks, joined.pcie, joined.fault) for joined in node.joins}
    empty = Topology(node.node, node.gpus, notes=node.notes)
    return Topology(
        node.node, node.gpus, {pair: joins.get(pair, Join()) for pair in empty.pairs()}, node.notes
    )


def _check(node: _Node, source: str) -> None:
    indices = [gpu.index for gpu in node.gpus]
    for gpu in node.gpus:
        if indices.count(gpu.index) > 1:
            raise ConfigError(f"{source}: gpus: index {gpu.index} appears twice")
        if not math.isfinite(gpu.nvlink_version or 0):
            raise ConfigError(f"{source}: gpus: nvlink_version of GPU {gpu.index}: expected a number")
    for number, joined in enumerate(node.joins):
        a, b = joined.pair
        if a >= b or a not in indices or b not in indices:
            expected = "two indices of `gpus`, the lower first"
            raise ConfigError(f"{source}: joins[{number}].pair: expected {expected} (got {[a, b]})")
        if joined.nvlinks < 0:
            raise ConfigError(f"{source}: joins[{number}].nvlinks: expected 0 or more (got {joined.nvlinks})")
