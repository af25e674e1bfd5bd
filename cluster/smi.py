"""The text of `nvidia-smi topo -m`.

    \tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID     (underlined by ANSI codes)
    GPU0\t X \tNV18\tPIX\t0-47\t0\t\tN/A
    GPU1\tNV18\t X \tSYS\t48-95\t1\t\tN/A
    NIC0\tPIX\tSYS\t X \t

Tabs do not line up with the header's, terminals turn them into spaces, old drivers have fewer columns, and
in wide tables cells of NICs run into each other. So GPU columns count from the left, affinities from the
right.
"""

from __future__ import annotations

import re

from gammaray.errors import ConfigError
from gammaray.validation import shorten

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
GPU = re.compile(r"GPU(?:0|[1-9]\d{0,3})")


def parse(text: str, source: str, forms: str) -> tuple[list[list[str]], list[int], list[int | None]]:
    """Cells between GPUs, their indices, their NUMA nodes. Raises ConfigError; `forms`: what to give."""
    lines = [ANSI.sub("", line) for line in text.splitlines()]
    table = [line.split() for line in lines if GPU.fullmatch("".join(line.split()[:1]))]
    if not table or table[0][1:2] == ["X"]:
        raise ConfigError(f"{source}: no line names the columns GPU0, GPU1, ...; expected {forms}")
    header, *rows = table
    titles = " ".join(header)
    columns = {name: place for place, name in enumerate(header) if GPU.fullmatch(name)}
    names = [row[0] for row in rows]
    if names != list(columns):
        found = shorten(" ".join(names)) or "none"
        raise ConfigError(f"{source}: rows {found}, but columns {shorten(' '.join(columns))}")
    cells = [[_cell(row, name, columns[name], source) for name in names] for row in rows]
    return cells, [int(name[3:]) for name in names], [_numa(row, titles) for row in rows]


def _cell(row: list[str], column: str, place: int, source: str) -> str:
    if place + 1 < len(row):
        return row[place + 1]
    raise ConfigError(f"{source}: row {row[0]} ends before column {column}")


def _numa(row: list[str], titles: str) -> int | None:
    """None: not said, or several."""
    if "NUMA Affinity" not in titles:
        return None
    value = row[-2] if "GPU NUMA ID" in titles else row[-1]
    return int(value) if re.fullmatch(r"\d{1,4}", value) else None
