"""Files and folders that are there as a whole or not at all, also after kill -9."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gammaray.errors import ConfigError


@contextmanager
def replacing(place: Path) -> Iterator[Path]:
    """A path beside `place` to write a file or a folder of files to. It becomes `place` at the end of the
    block, once it is on the disk; a block that raises leaves nothing.

    A file that is there is replaced. A folder that is there is an OSError: move it out of the way before.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    work = place.parent / f".{place.name}.part"
    _remove(work)  # of a process that was killed
    try:
        yield work
        for path in [*work.rglob("*"), work]:
            sync(path)
        os.replace(work, place)
        sync(place.parent)
    finally:
        _remove(work)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Nobody else works in a folder, which is made if need be, until the block or the process ends.

    Raises ConfigError when somebody does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(
            f"another process works in {folder}: wait for it, or take another folder"
        ) from error
    finally:
        os.close(descriptor)


def bind(file: Path, settings: Mapping[str, Any]) -> None:
    """What a folder was made with: noted as JSON the first time, and the same ever after.

    Raises ConfigError that names what differs.
    """
    settings = json.loads(json.dumps(settings))  # as they will be read
    if not file.is_file():
        with replacing(file) as work:
            work.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return
    known = noted(file)
    if changed := sorted(name for name in {*known, *settings} if known.get(name) != settings.get(name)):
        raise ConfigError(
            f"{file.parent} was made with another {' and '.join(changed)}: give what it began with, or take "
            "a new folder"
        )


def noted(file: Path) -> dict[str, Any]:
    """What `bind` wrote. Raises ConfigError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {type(error).__name__}: remove {file.parent}") from error
    return found if isinstance(found, dict) else {}


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
