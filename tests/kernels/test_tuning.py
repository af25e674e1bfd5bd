"""The choice of tiles and splits: pure rules, an injected clock, and a file that may be anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gammaray.kernels import tuning
from gammaray.kernels.tuning import Case, Tile, Tuner, candidates, query_rows, splits

CASE = Case("some GPU", 90, "bfloat16", 128, 4, 64)


class Clock:
    """The later a candidate comes, the faster it is."""

    def __init__(self) -> None:
        self.measured: list[Tile] = []

    def __call__(self, tile: Tile) -> float:
        self.measured.append(tile)
        return 1.0 / len(self.measured)


def test_the_fastest_candidate_is_measured_once_and_outlives_the_process(tmp_path: Path) -> None:
    file, clock = tmp_path / "new" / "tiles.json", Clock()
    tuner = Tuner(file, "v1")
    assert tuner.choose(CASE, clock) == candidates(CASE)[-1]
    assert tuner.choose(CASE, clock) == Tuner(file, "v1").choose(CASE, clock) == candidates(CASE)[-1]
    assert clock.measured == list(candidates(CASE))
    assert list(file.parent.iterdir()) == [file]  # no half-written file is left


def test_nothing_is_measured_without_a_clock_and_nothing_remembered(tmp_path: Path) -> None:
    tuner, clock = Tuner(tmp_path / "tiles.json", "v1"), Clock()
    assert tuner.choose(CASE, None) == candidates(CASE)[0]
    assert tuner.choose(CASE, clock) == candidates(CASE)[-1]


def test_another_version_measures_anew(tmp_path: Path) -> None:
    clock = Clock()
    Tuner(tmp_path / "tiles.json", "v1").choose(CASE, clock)
    Tuner(tmp_path / "tiles.json", "v2").choose(CASE, clock)
    assert len(clock.measured) == 2 * len(candidates(CASE))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": "v1"}',
        '{"version": "v1", "tiles": []}',
        '{"version": "v1", "tiles": {"a": [1]}}',
        json.dumps({"version": "v1", "tiles": {CASE.key: [3, 3, 3, 3]}}),  # no candidate
        json.dumps({"version": "v1", "tiles": {CASE.key: [[], 1, 1, 1]}}),
    ],
)
def test_a_broken_file_counts_as_empty_and_is_replaced(content: str, tmp_path: Path) -> None:
    file = tmp_path / "tiles.json"
    file.write_text(content)
    assert Tuner(file, "v1").choose(CASE, Clock()) == candidates(CASE)[-1]
    assert json.loads(file.read_text())["tiles"][CASE.key] == [*vars_of(candidates(CASE)[-1])]


def vars_of(tile: Tile) -> tuple[int, ...]:
    return tile.block_m, tile.block_n, tile.warps, tile.stages


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tuner, clock = Tuner(tmp_path / "file" / "tiles.json", "v1"), Clock()
    assert tuner.choose(CASE, clock) == tuner.choose(CASE, clock) == candidates(CASE)[-1]
    assert len(clock.measured) == len(candidates(CASE))


def test_processes_keep_what_others_found(tmp_path: Path) -> None:
    file, other = tmp_path / "tiles.json", Case("some GPU", 90, "float16", 64, 3, 16)
    one, two = Tuner(file, "v1"), Tuner(file, "v1")
    for tuner in (one, two):
        tuner.choose(Case("third", 90, "float16", 64, 3, 16), None)  # both have read the file
    one.choose(CASE, Clock())
    two.choose(other, Clock())
    assert set(json.loads(file.read_text())["tiles"]) == {CASE.key, other.key}


def test_candidates_that_cannot_run_are_never_chosen(tmp_path: Path) -> None:
    tuner, tiles = Tuner(tmp_path / "tiles.json", "v1"), candidates(CASE)
    assert tuner.choose(CASE, lambda tile: 1.0 if tile == tiles[1] else float("inf")) == tiles[1]
    other = Case("another", 90, "bfloat16", 128, 4, 64)
    assert tuner.choose(other, lambda tile: float("inf")) == tiles[0]
    assert tuner.choose(other, lambda tile: pytest.fail("measured again")) == tiles[0]
    assert other.key not in json.loads((tmp_path / "tiles.json").read_text())["tiles"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 192, 256])
def test_every_tile_holds_a_group_and_is_a_power_of_two(dtype: str, head_dim: int) -> None:
    for group in (1, 3, 4, 8, 12, 16, 71, 128, 200):
        for rows in (16, 32, 64, 128):
            tiles = candidates(Case("", 90, dtype, head_dim, group, rows))
            assert tiles and len(set(tiles)) == len(tiles)
            for tile in tiles:
                assert tile.block_m >= group
                assert all(size >= 16 and size & (size - 1) == 0 for size in (tile.block_m, tile.block_n))


def test_a_tile_that_spills_on_older_devices_is_not_tried_there() -> None:
    for capability, tried in ((80, False), (89, False), (90, True)):
        tiles = candidates(Case("", capability, "bfloat16", 128, 4, 128))
        assert (tuning.WIDE in tiles) == tried and len(tiles) >= 4


def test_a_verified_tree_of_64_query_rows_is_read_once() -> None:
    assert all(tile.block_m >= 64 for tile in candidates(CASE))


@pytest.mark.parametrize(
    ("tokens", "sequences", "group", "rows"),
    [(1, 1, 1, 16), (32, 32, 4, 16), (256, 32, 4, 32), (257, 32, 4, 64), (2080, 33, 8, 128), (5, 8, 3, 16)],
)
def test_query_rows_by_the_mean_sequence(tokens: int, sequences: int, group: int, rows: int) -> None:
    assert query_rows(tokens, sequences, group) == rows


@pytest.mark.parametrize(
    ("programs", "longest", "found"),
    [
        (8, 65536, 33),  # one sequence: fill 132 multiprocessors twice
        (8, 8192, 32),  # 256 slots each
        (8, 255, 1),
        (80, 65536, 3),
        (1024, 65536, 1),  # busy without
        (1, 2**20, 64),
    ],
)
def test_splits_fill_the_device_and_stay_long_enough(programs: int, longest: int, found: int) -> None:
    assert splits(programs, longest, 132) == found


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.cache_file() == tmp_path / "gammaray" / "attention-tiles.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning.cache_file() == tmp_path / ".cache" / "gammaray" / "attention-tiles.json"
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without a home
    assert "~" not in str(tuning.cache_file())
