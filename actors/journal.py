"""What the controller must not lose: a commit is kept whole or not at all, wherever its process is killed."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ray.experimental import internal_kv

from gammaray.actors.crew import get, put

logger = logging.getLogger(__name__)

Record = Mapping[
    str, Any
]  # of a decision, as JSON; `number` counts them, `run` is of all since a first start
RECORDS_KEPT = 1000  # beside the file
BLOCK = 65_536  # bytes, more than a line has
COMMIT, RECORDS, RUN = "journal/commit", "journal/records", "journal/run"


class KV(Protocol):
    """Each put is atomic, and there to stay."""

    def get(self, name: str) -> Any:
        """None when there is nothing."""
        ...

    def put(self, name: str, value: object) -> None:
        """None: away with it."""
        ...

    def names(self, prefix: str) -> list[str]:
        """Of what there is below a prefix."""
        ...


class RayKV:
    """Ray's internal KV: lives as long as the Ray cluster."""

    def __init__(self, root: str) -> None:
        self._root = f"{root}: "

    def get(self, name: str) -> Any:
        return get(self._key(name))

    def put(self, name: str, value: object) -> None:
        put(self._key(name), value)

    def names(self, prefix: str) -> list[str]:
        keys: list[bytes] = internal_kv._internal_kv_list(self._key(prefix))
        return sorted(key.decode().removeprefix(self._root) for key in keys)

    def _key(self, name: str) -> bytes:
        return f"{self._root}{name}".encode()


class AuditLog:
    """One JSON line a record; what a crash left of a line is cut off. OSError: the file cannot be used."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        with self._path.open("ab") as file:
            self._end = _end_of_lines(self._path, file.tell())
            file.truncate(self._end)
        self.last = _last_number(self._path, self._end)

    def extend(self, records: Iterable[Record]) -> None:
        """Writes those that it does not have, to the disk itself."""
        fresh = [record for record in records if record["number"] > self.last]
        if not fresh:
            return
        with self._path.open("ab") as file:
            file.truncate(min(self._end, file.tell()))  # less: somebody moved the file away
            file.write("".join(f"{json.dumps(record)}\n" for record in fresh).encode())
            file.flush()
            os.fsync(file.fileno())
            self._end = file.tell()
        self.last = fresh[-1]["number"]


def _end_of_lines(path: Path, size: int) -> int:
    with path.open("rb") as file:
        for start in range((size - 1) // BLOCK * BLOCK, -1, -BLOCK):
            file.seek(start)
            if (at := file.read(min(BLOCK, size - start)).rfind(b"\n")) >= 0:
                return start + at + 1
    return 0


def _last_number(path: Path, end: int) -> int:
    """0 when there is no line, or the last one is no record."""
    start = _end_of_lines(path, max(end - 1, 0))
    with path.open("rb") as file:
        file.seek(start)
        line = file.read(end - start)
    try:
        return int(json.loads(line)["number"])
    except (ValueError, KeyError, TypeError):
        return 0


@dataclass(frozen=True, slots=True)
class Commit:
    """`changes` by name; None removes."""

    changes: Mapping[str, object] = field(default_factory=dict)
    records: tuple[Record, ...] = ()


class Journal:
    """A redo log over a KV and a file. Whoever holds it alone writes; `commit` may be tried again and again.

    A commit is put down as one value, then carried out, then crossed out. One that was not crossed out is
    carried out again at the next start, which changes nothing that had been.
    """

    def __init__(self, kv: KV, log: AuditLog | None = None) -> None:
        self._kv, self._log = kv, log
        self._left = kv.get(COMMIT)
        self._records: tuple[Record, ...] = kv.get(RECORDS) or ()
        if self._left:
            self._finish(self._left)
        self._write_log()
        self._run: str = kv.get(RUN) or secrets.token_hex(4)
        kv.put(RUN, self._run)
        self._number = max(self._records[-1]["number"] if self._records else 0, log.last if log else 0)

    def load(self, prefix: str) -> dict[str, Any]:
        """What was committed below a prefix, by the rest of its name."""
        return {name.removeprefix(prefix): self._kv.get(name) for name in self._kv.names(prefix)}

    def read(self, name: str) -> Any:
        """What was committed last; None when there is nothing."""
        return self._kv.get(name)

    def records(self, limit: int) -> tuple[Record, ...]:
        """The last ones, newest first."""
        return self._records[::-1][:limit]

    def commit(self, changes: Mapping[str, object], facts: Sequence[Mapping[str, Any]] = ()) -> None:
        """Once this returns, no crash undoes it. What raises is tried again with the next commit."""
        number, run = self._number, self._run
        records = tuple({"number": number + i, "run": run, **fact} for i, fact in enumerate(facts, 1))
        before = self._left or Commit()
        left = Commit({**before.changes, **changes}, (*before.records, *records))
        self._number += len(records)
        if left.changes or left.records:
            self._left = left
            self._kv.put(COMMIT, left)
            self._finish(left)
        self._write_log()

    def _finish(self, commit: Commit) -> None:
        for name, value in commit.changes.items():
            self._kv.put(name, value)
        if commit.records:
            last = self._records[-1]["number"] if self._records else 0
            fresh = (record for record in commit.records if record["number"] > last)
            records = (*self._records, *fresh)[-RECORDS_KEPT:]
            self._kv.put(RECORDS, records)
            self._records = records
        self._kv.put(COMMIT, None)
        self._left = None

    def _write_log(self) -> None:
        """A disk that is full keeps nobody from deciding: the file gets its lines as soon as it can."""
        if self._log:
            try:
                self._log.extend(self._records)
            except OSError as error:
                logger.error("cannot write to the audit log: %s", error.strerror)
