"""Which tiles an attention launch uses, and in how many splits.

Tiles are measured once per device and case, among a few candidates that are known to compile without
spilling. The winners are kept in memory and in a file of the user's cache folder. Where nothing can be
measured (no GPU, or a CUDA graph is being captured) the first candidate serves.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

LEAST_ROWS, MOST_ROWS = 16, 128  # of a tile: what matrix units take at least, what registers hold
PER_SM = 2  # programs that a multiprocessor runs at once
LEAST_SLOTS = 256  # of a split: below, joining the splits costs more than they save
MOST_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's share: query rows by key slots, and how it is compiled."""

    block_m: int
    block_n: int
    warps: int
    stages: int  # of loads ahead; page numbers and what they lead to take turns, so 5 are two tiles of keys


WIDE, WIDE_SINCE = Tile(128, 64, 8, 5), 90  # older matrix units take operands from registers: it would spill


@dataclass(frozen=True, slots=True)
class Case:
    """What the choice depends on."""

    device: str  # its name
    capability: int  # its compute capability, times ten; 0: no GPU
    dtype: str
    head_dim: int  # the larger of keys' and values'
    group: int  # query heads that share a key head
    rows: int  # query rows of a key head and sequence: see `query_rows`

    @property
    def key(self) -> str:
        return "/".join(map(str, astuple(self)))


def query_rows(tokens: int, sequences: int, group: int) -> int:
    """Query heads x tokens that read the same keys, by the mean sequence, as a power of two: 16 to 128."""
    mean = group * -(-tokens // sequences)
    return min(max(_power_of_two(mean), LEAST_ROWS), MOST_ROWS)


def candidates(case: Case) -> tuple[Tile, ...]:
    """Tiles worth a try, the safest guess first. All hold the heads of a group."""
    tiles = _half(case) if case.dtype in ("float16", "bfloat16") else _full(case)
    least = _power_of_two(case.group)
    found = tuple(tile for tile in tiles if tile.block_m >= least)
    return found or (Tile(least, 16, 8, 3),)


def _half(case: Case) -> tuple[Tile, ...]:
    if case.head_dim > 128:
        if case.rows >= 64:
            return (Tile(64, 32, 8, 5),)
        return Tile(case.rows, 32, 4, 5), Tile(case.rows, 16, 4, 5)
    if case.rows < 64:
        return Tile(case.rows, 64, 4, 5), Tile(case.rows, 64, 4, 7), Tile(case.rows, 32, 4, 7)
    tiles = Tile(64, 64, 4, 5), Tile(64, 64, 8, 5), Tile(64, 32, 4, 5)
    if case.rows == 64:
        return tiles
    return (*((WIDE,) if case.capability >= WIDE_SINCE else ()), Tile(128, 32, 8, 5), *tiles)


def _full(case: Case) -> tuple[Tile, ...]:
    """Without matrix units a product takes many registers: small tiles. Above 128 even this one spills."""
    if case.head_dim > 64:
        return (Tile(16, 16, 8, 3),)
    return Tile(16, 16, 4, 3), Tile(16, 32, 8, 3)


def splits(programs: int, longest: int, multiprocessors: int) -> int:
    """Into how many parts a launch cuts every row's keys.

    `programs` are there without, rows have up to `longest` slots. Enough parts to keep the device busy, no
    more than that takes, and none shorter than LEAST_SLOTS in the longest row.
    """
    wanted = PER_SM * multiprocessors // programs
    return max(1, min(wanted, longest // LEAST_SLOTS, MOST_SPLITS))


class Tuner:
    """Choices in memory and in a JSON file, which processes may share: it is replaced as a whole.

    A file that is broken or of another version counts as empty, one that cannot be written is done without.
    """

    def __init__(self, path: Path, version: str) -> None:
        """`version`: of the compiler and of the kernels; what was measured with others does not hold."""
        self._path = path
        self._version = version
        self._chosen: dict[str, Tile] | None = None

    def choose(self, case: Case, measure: Callable[[Tile], float] | None) -> Tile:
        """The fastest candidate by `measure` (any unit; infinite: it cannot run); None: the first one."""
        if self._chosen is None:
            self._chosen = self._read()
        tiles = candidates(case)
        if self._chosen.get(case.key) in tiles:
            return self._chosen[case.key]
        if measure is None:
            return tiles[0]
        times = {tile: measure(tile) for tile in tiles}
        best = min(tiles, key=times.__getitem__)
        self._chosen[case.key] = best  # also where none runs: trying again would take as long
        if math.isfinite(times[best]):
            self._write(self._read() | {case.key: best})
        return best

    def _read(self) -> dict[str, Tile]:
        try:
            found = json.loads(self._path.read_text())
            if found["version"] == self._version:
                return {key: Tile(*tile) for key, tile in found["tiles"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass
        return {}

    def _write(self, tiles: dict[str, Tile]) -> None:
        content = {"version": self._version, "tiles": {key: astuple(tile) for key, tile in tiles.items()}}
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
                json.dump(content, file)
            os.replace(file.name, self._path)


def cache_file() -> Path:
    """In XDG_CACHE_HOME or ~/.cache; in the temporary folder for a user without a home."""
    home = os.path.expanduser("~")
    cache = os.environ.get("XDG_CACHE_HOME") or (
        tempfile.gettempdir() if home == "~" else os.path.join(home, ".cache")
    )
    return Path(cache, "gammaray", "attention-tiles.json")


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
