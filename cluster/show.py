"""What `gammaray topology` prints."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from gammaray.cluster.labels import as_flag
from gammaray.cluster.labels import labels as node_labels
from gammaray.cluster.saved import dump
from gammaray.cluster.topology import (
    Gpu,
    Pair,
    Topology,
    count,
    excluded,
    fabric_islands,
    islands,
    printable,
)

MOST_PAIRS = 8  # that are named for one reason


def as_json(topologies: Sequence[Topology], min_version: float) -> dict[str, Any]:
    """One node's GPUs, islands and excluded pairs; of several the first one's, and `nodes` has all of them.

    `matrix.read` takes it back.
    """
    nodes = [_node(topology, min_version) for topology in topologies]
    if len(nodes) == 1:
        return nodes[0]
    fabrics = [[list(member) for member in island] for island in fabric_islands(topologies)]
    return nodes[0] | {"nodes": nodes, "fabric_islands": fabrics}


def labels(topologies: Sequence[Topology], environ: Mapping[str, str], as_json: bool) -> str:
    """Of the Ray nodes there, in the environment `environ`: a line for each; as JSON of several a list."""
    found = [node_labels(topology, environ) for topology in topologies]
    if as_json:
        return json.dumps(found[0] if len(found) == 1 else found)
    return "\n".join(map(as_flag, found))


def _node(topology: Topology, min_version: float) -> dict[str, Any]:
    reasons = excluded(topology, min_version)
    return dump(topology) | {
        "min_nvlink_version": min_version,
        "islands": [list(island) for island in islands(topology, min_version)],
        "excluded": [{"pair": list(pair), "reason": reason} for pair, reason in reasons.items()],
    }


def as_text(topologies: Sequence[Topology], min_version: float) -> str:
    blocks = ["\n".join(map(printable, _lines(topology, min_version))) for topology in topologies]
    for island in fabric_islands(topologies):
        members = ", ".join(f"{node}:{index}" for node, index in island)
        blocks.append(printable(f"one NVLink fabric across nodes: {members}"))
    return "\n\n".join(blocks)


def _lines(topology: Topology, min_version: float) -> list[str]:
    lines = [f"node {topology.node}: {count(len(topology.gpus), 'GPU')}", *_table(topology.gpus)]
    if topology.gpus:
        found = "  ".join(f"[{' '.join(map(str, island))}]" for island in islands(topology, min_version))
        lines.append(f"islands at NVLink >= {min_version:g}: {found}")
    return [*lines, *_reasons(topology, min_version), *(f"note: {note}" for note in topology.notes)]


def _table(gpus: Sequence[Gpu]) -> list[str]:
    rows = [_row(gpu) for gpu in gpus]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _row(gpu: Gpu) -> list[str]:
    parts = f"MIG: {' + '.join(_size(part.memory) for part in gpu.mig)}" if gpu.mig else ""
    return [
        f"GPU {gpu.index}",
        gpu.name,
        _size(gpu.memory),
        "no NVLink version" if gpu.nvlink_version is None else f"NVLink {gpu.nvlink_version:g}",
        "" if gpu.numa is None else f"NUMA {gpu.numa}",
        gpu.uuid,
        parts,
    ]


def _reasons(topology: Topology, min_version: float) -> list[str]:
    """One line for each reason, however many pairs it holds for."""
    groups: defaultdict[str, list[Pair]] = defaultdict(list)
    for pair, reason in excluded(topology, min_version).items():
        groups[reason].append(pair)
    every = len(topology.pairs())
    return [f"  not linked: {_pairs(pairs, every)}: {reason}" for reason, pairs in groups.items()]


def _pairs(pairs: Sequence[Pair], every: int) -> str:
    if len(pairs) == every and every > 1:
        return f"all {every} pairs"
    names = ", ".join(f"{a}-{b}" for a, b in pairs[:MOST_PAIRS])
    return names if len(pairs) <= MOST_PAIRS else f"{names} and {len(pairs) - MOST_PAIRS} more"


def _size(memory: int | None) -> str:
    return "? GiB" if memory is None else f"{memory / 2**30:.1f} GiB"
