"""Topologies from files: the text of `nvidia-smi topo -m`, a matrix as JSON, or what `--save` wrote."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from gammaray.cluster import saved, smi
from gammaray.cluster.gpus import lookup, named
from gammaray.cluster.topology import Gpu, Join, PcieClass, Topology
from gammaray.errors import ConfigError
from gammaray.validation import shorten

UNNAMED = "unknown GPU"
CELLS: dict[str, PcieClass] = {cell: cell for cell in get_args(PcieClass)} | {
    "SOC": "SYS"
}  # SOC: old drivers
FORMS = "the text of `nvidia-smi topo -m`, or JSON that `gammaray topology --save` wrote"


@dataclass(frozen=True, slots=True)
class Matrix:
    """`cells[i][j]` joins GPUs `indices[i]` and `indices[j]`, in the words of nvidia-smi."""

    cells: list[list[str]]
    indices: list[int]
    numa: list[int | None]
    gpu_name: str = UNNAMED


def read(path: Path, gpu_name: str | None = None) -> list[Topology]:
    """The nodes of one file. `gpu_name` comes before what the file calls its GPUs.

    A node without a name has the file's. Raises ConfigError that names the file, and the row and column.
    """
    return read_all([path], gpu_name)


def read_all(paths: Iterable[Path], gpu_name: str | None = None) -> list[Topology]:
    """The nodes of several files. A name that comes again gets a number: the same file twice is two nodes.

    Names that files give come first, then by path, so that the order of `paths` changes no name.
    """
    entries = [(path, data) for path in paths for data in _entries(path)]
    names: dict[int, str] = {}
    for i in sorted(range(len(entries)), key=lambda i: (not _name(entries[i][1]), entries[i][0])):
        path, data = entries[i]
        names[i] = _fresh(_name(data) or path.stem, names.values())
    return [_topology(data, names[i], gpu_name, str(path)) for i, (path, data) in enumerate(entries)]


def _name(data: object) -> str:
    """Of a node, as the file has it; '': none."""
    own = data.get("node") if isinstance(data, dict) else None
    return own if isinstance(own, str) else ""


def _entries(path: Path) -> list[Any]:
    """One of the file's nodes each: a Matrix, or anything that JSON can hold."""
    try:
        text = _decoded(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read topology '{path}': {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file; expected {FORMS}") from None
    if not text.lstrip().startswith(("{", "[")):
        return [_from_text(text, str(path))]
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} line {error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    nodes = data.get("nodes", data) if isinstance(data, dict) else data
    entries = nodes if isinstance(nodes, list) else [nodes]
    if not entries:
        raise ConfigError(f"{path}: holds no node; expected {FORMS}")
    return entries


def _decoded(content: bytes) -> str:
    """PowerShell writes what a command prints as UTF-16."""
    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if wide else "utf-8-sig")


def _fresh(name: str, taken: Iterable[str]) -> str:
    names = set(taken)
    numbered = (f"{name}-{number}" for number in range(2, len(names) + 3))
    return name if name not in names else next(other for other in numbered if other not in names)


def _topology(data: object, node: str, gpu_name: str | None, source: str) -> Topology:
    if isinstance(data, Matrix):
        return _of_matrix(data, node, gpu_name, source)
    if not isinstance(data, dict) or not {"matrix", "joins"} & data.keys():
        raise ConfigError(f"{source}: expected a topology with `matrix` or `joins`; {FORMS}")
    if "matrix" in data:
        return _of_matrix(_from_json(data, source), node, gpu_name, source)
    topology = saved.load(data | {"node": node}, source)
    return named(topology, gpu_name) if gpu_name else topology


def _from_text(text: str, source: str) -> Matrix:
    cells, indices, numa = smi.parse(text, source, FORMS)
    return Matrix(cells, indices, numa)


def _from_json(data: dict[str, Any], source: str) -> Matrix:
    cells, numa, name = data["matrix"], data.get("numa"), data.get("gpu_name") or UNNAMED
    if not isinstance(cells, list) or not all(isinstance(row, list) for row in cells):
        raise ConfigError(f"{source}: matrix: expected a list of rows")
    if not isinstance(name, str):
        raise ConfigError(f"{source}: gpu_name: expected a text (got {shorten(repr(name))})")
    numa = [None] * len(cells) if numa is None else numa
    if not isinstance(numa, list) or not all(node is None or type(node) is int for node in numa):
        raise ConfigError(f"{source}: numa: expected a list of numbers")
    if len(numa) != len(cells):
        raise ConfigError(f"{source}: numa: expected one number for each row, {len(cells)} in all")
    return Matrix(cells, list(range(len(cells))), numa, name)


def _of_matrix(matrix: Matrix, node: str, gpu_name: str | None, source: str) -> Topology:
    """A matrix has no UUIDs, so each GPU's says which node and index it is."""
    name = gpu_name or matrix.gpu_name
    model = lookup(name)
    gpus = tuple(
        Gpu(index, f"{node}:{index}", name, model.memory, numa, nvlink_version=model.nvlink)
        for index, numa in zip(matrix.indices, matrix.numa, strict=True)
    )
    return Topology(node, gpus, _joins(matrix, source))


def _joins(matrix: Matrix, source: str) -> dict[tuple[int, int], Join]:
    """Of the upper half; raises ConfigError unless the lower one says the same."""
    joins: dict[tuple[int, int], Join] = {}
    for i, row in enumerate(matrix.cells):
        if len(row) != len(matrix.cells):
            expected = f"as many cells as rows, {len(matrix.cells)}"
            raise ConfigError(f"{source}: row {i}: expected {expected} (got {len(row)})")
        for j, cell in enumerate(row):
            pair = matrix.indices[i], matrix.indices[j]
            where = f"{source}: row GPU{pair[0]}, column GPU{pair[1]}"
            join = _join(cell, i == j, where)
            if j > i:
                joins[pair] = join
            elif j < i and joins[pair[::-1]] != join:
                raise ConfigError(f"{where}: {cell!r}, but {matrix.cells[j][i]!r} the other way round")
    return joins


def _join(cell: object, diagonal: bool, where: str) -> Join:
    if isinstance(cell, str) and diagonal == (cell == "X"):
        if cell in CELLS or diagonal:
            return Join(pcie=CELLS.get(cell))
        if links := re.fullmatch(r"NV([1-9]\d{0,2})", cell):
            return Join(nvlinks=int(links[1]))
    expected = "X" if diagonal else f"NV and a number, or one of {', '.join(CELLS)}"
    raise ConfigError(f"{where}: expected {expected} (got {shorten(repr(cell))})")
