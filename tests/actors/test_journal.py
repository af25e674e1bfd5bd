"""Commits that are whole or not there, wherever the process is killed; and the file beside them."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kv import Killed, MemoryKV

from gammaray.actors.journal import RECORDS_KEPT, AuditLog, Journal


def lines(path: Path) -> list[dict[str, Any]]:
    """Without the run, which is random."""
    every = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "run"} for line in every]


def values(kv: MemoryKV) -> dict[str, Any]:
    """What a journal that starts now finds, beside its own."""
    found = Journal(MemoryKV(kv.values)).load("")
    return {name: value for name, value in found.items() if not name.startswith("journal/")}


def numbers(kv: MemoryKV) -> list[int]:
    return [record["number"] for record in Journal(MemoryKV(kv.values)).records(99)]


def test_what_was_committed_is_there(tmp_path: Path) -> None:
    kv, path = MemoryKV(), tmp_path / "audit"
    journal = Journal(kv, AuditLog(str(path)))
    journal.commit({"a": 1, "b/c": 2}, [{"rule": "x"}, {"rule": "y"}])
    journal.commit({"a": None})
    assert Journal(kv).load("b/") == {"c": 2}
    assert Journal(kv).read("a") is None
    assert lines(path) == [{"number": 1, "rule": "x"}, {"number": 2, "rule": "y"}]
    assert [record["rule"] for record in Journal(kv).records(1)] == ["y"]


PUTS = 6  # of the commit below: itself, three values, the records, and its end


@pytest.mark.parametrize("kill", range(1, PUTS + 1))
def test_a_kill_at_any_put_leaves_all_of_a_commit_or_nothing(kill: int) -> None:
    kv = MemoryKV()
    Journal(kv).commit({"a": 1, "b": 1}, [{"rule": "x"}])
    journal = Journal(kv)
    kv.kill_after = kill
    with pytest.raises(Killed):
        journal.commit({"a": 2, "b": 2, "c": 2}, [{"rule": "y"}])
    if kill == 1:
        assert (values(kv), numbers(kv)) == ({"a": 1, "b": 1}, [1])
    else:
        assert (values(kv), numbers(kv)) == ({"a": 2, "b": 2, "c": 2}, [2, 1])


def test_what_could_not_be_kept_comes_with_the_next_commit(tmp_path: Path) -> None:
    kv = MemoryKV()
    journal = Journal(kv, AuditLog(str(tmp_path / "audit")))
    kv.kill_after = 1
    with pytest.raises(Killed):
        journal.commit({"a": 1}, [{"rule": "x"}])
    kv.kill_after = None
    journal.commit({"b": 1}, [{"rule": "y"}])
    assert values(kv) == {"a": 1, "b": 1}
    assert [line["rule"] for line in lines(tmp_path / "audit")] == ["x", "y"]


@pytest.mark.parametrize("torn", [b"{", b'{"number": 3, "rule": "z"}', b"\x00\x00", b"x" * 200_000])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "audit"
    AuditLog(str(path)).extend([{"number": 1, "rule": "x"}, {"number": 2, "rule": "y"}])
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    log = AuditLog(str(path))
    assert (path.read_bytes(), log.last) == (whole, 2)
    log.extend([{"number": 2, "rule": "y"}, {"number": 3, "rule": "z"}])
    assert [line["rule"] for line in lines(path)] == ["x", "y", "z"]


def test_a_file_with_nothing_but_a_torn_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    path.write_bytes(b'{"number')
    assert AuditLog(str(path)).last == 0
    assert path.read_bytes() == b""


def test_a_decision_that_a_crash_kept_from_the_file_is_in_it_after_the_next_start(tmp_path: Path) -> None:
    kv = MemoryKV()
    Journal(kv).commit({}, [{"rule": "x"}])  # as if killed before it wrote the file
    Journal(kv, AuditLog(str(tmp_path / "audit")))
    Journal(kv, AuditLog(str(tmp_path / "audit")))
    assert Journal(kv).records(1)[0]["run"] in (tmp_path / "audit").read_text()
    assert lines(tmp_path / "audit") == [{"number": 1, "rule": "x"}]


def test_a_new_server_goes_on_in_an_old_file(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    Journal(MemoryKV(), AuditLog(str(path))).commit({}, [{"rule": "x"}])
    Journal(MemoryKV(), AuditLog(str(path))).commit({}, [{"rule": "y"}])
    assert [line["number"] for line in lines(path)] == [1, 2]
    first, second = (json.loads(line)["run"] for line in path.read_text().splitlines())
    assert first != second


def test_a_file_that_was_moved_away_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    journal = Journal(MemoryKV(), AuditLog(str(path)))
    journal.commit({}, [{"rule": "x"}])
    path.rename(tmp_path / "audit.1")
    journal.commit({}, [{"rule": "y"}])
    assert [line["rule"] for line in lines(path)] == ["y"]


def test_a_full_disk_keeps_nobody_from_deciding(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    journal = Journal(kv := MemoryKV(), AuditLog(str(folder / "audit")))
    folder.rename(tmp_path / "away")
    journal.commit({"a": 1}, [{"rule": "x"}])
    assert Journal(kv).read("a") == 1
    (tmp_path / "away").rename(folder)
    journal.commit({}, [{"rule": "y"}])
    assert [line["rule"] for line in lines(folder / "audit")] == ["x", "y"]


def test_only_the_last_records_stay_beside_the_file() -> None:
    journal = Journal(MemoryKV())
    for _ in range(3):
        journal.commit({}, [{"rule": "x"}] * (RECORDS_KEPT // 2))
    kept = [record["number"] for record in journal.records(10**6)]
    assert kept == list(range(3 * RECORDS_KEPT // 2, RECORDS_KEPT // 2, -1))


COMMITS = st.lists(
    st.tuples(st.dictionaries(st.sampled_from("abc"), st.none() | st.integers(0, 9)), st.integers(0, 2)),
    min_size=1,
    max_size=5,
)


@given(COMMITS, st.integers(1, 25))
def test_a_crash_anywhere_equals_a_prefix_of_the_commits(
    commits: list[tuple[dict[str, int | None], int]], kill: int
) -> None:
    kv, model = MemoryKV(kill_after=kill), [({}, 0)]
    for changes, records in commits:
        merged = {**model[-1][0], **changes}
        model.append(({k: v for k, v in merged.items() if v is not None}, model[-1][1] + records))
    done = 0
    with suppress(Killed):
        journal = Journal(kv)
        for changes, records in commits:
            journal.commit(changes, [{"rule": "x"}] * records)
            done += 1
    assert (values(kv), len(numbers(kv))) in model[done : done + 2]
