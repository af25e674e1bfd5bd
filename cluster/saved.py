"""A topology as JSON: what `gammaray topology --save` writes, and `--json` prints among other things."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from gammaray.cluster.topology import Gpu, Join, Mig, Pair, PcieClass, Topology
from gammaray.errors import ConfigError
from gammaray.validation import explain, path, shorten

Entry = TypeVar("Entry", bound=Hashable)


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
        node = NODE.validate_json(json.dumps(data), strict=True)  # strict Python would refuse lists
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
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
    if error := next(chain(_wrong_gpus(node.gpus), _wrong_joins(node)), None):
        raise ConfigError(f"{source}: {error}")


def _wrong_gpus(gpus: Sequence[Gpu]) -> Iterator[str]:
    every: list[Gpu | Mig] = [*gpus, *(part for gpu in gpus for part in gpu.mig)]
    yield from (f"gpus: index {index} appears twice" for index in _twice([gpu.index for gpu in gpus]))
    uuids = _twice([part.uuid for part in every])
    yield from (f"gpus: uuid {shorten(repr(uuid))} appears twice" for uuid in uuids)
    if not all(part.memory is None or 0 < part.memory < 2**63 for part in every):
        yield "gpus: memory: expected bytes, 1 or more"
    for number, gpu in enumerate(gpus):
        where = f"gpus[{number}]"
        if gpu.index < 0:
            yield f"{where}.index: expected 0 or more (got {gpu.index})"
        if gpu.nvlink_version is not None and not 0 < gpu.nvlink_version < math.inf:
            yield f"{where}.nvlink_version: expected a number above 0 (got {gpu.nvlink_version})"


def _wrong_joins(node: _Node) -> Iterator[str]:
    indices = {gpu.index for gpu in node.gpus}
    for number, joined in enumerate(node.joins):
        a, b = joined.pair
        if a >= b or not {a, b} <= indices:
            expected = "two indices of `gpus`, the lower first"
            yield f"joins[{number}].pair: expected {expected} (got {[a, b]})"
        if joined.nvlinks < 0:
            yield f"joins[{number}].nvlinks: expected 0 or more (got {joined.nvlinks})"
    pairs = [joined.pair for joined in node.joins]
    yield from (f"joins: pair {list(pair)} appears twice" for pair in _twice(pairs))


def _twice(found: Sequence[Entry]) -> list[Entry]:
    return [entry for entry, times in Counter(found).items() if times > 1]
