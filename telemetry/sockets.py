"""Metrics of all our processes of a node in one text: each serves its own on a Unix socket of one folder.

Whoever connects is sent the whole text and END, and that is the protocol. File permissions are the guard.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from gammaray.telemetry.names import INSTANCE, UP

log = logging.getLogger(__name__)

TIMEOUT_S = 1.0  # of a process, to send all of its text
LONGEST_PATH = 103  # bytes, where the least is allowed (macOS)
READERS = 8  # at once
SUFFIX = ".sock"
CHUNK_BYTES = 1 << 20
END = b"# EOF\n"  # half a line would spoil the whole scrape


def folder(session: str) -> Path:
    """Where the processes of this node that belong to `session` meet: short, and of this user alone."""
    name = hashlib.sha256(session.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"gammaray-{os.getuid()}-{name}"


class Registration:
    """A listening socket and the thread that answers on it."""

    def __init__(self, listener: socket.socket, path: Path, collect: Callable[[], bytes]) -> None:
        self._listener, self._path, self._collect = listener, path, collect
        self._inode, self._failed = path.stat().st_ino, False
        threading.Thread(target=self._answer, daemon=True, name="metrics").start()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with suppress(OSError), connection:  # who asked may have left
                connection.settimeout(TIMEOUT_S)
                connection.sendall(self._text())

    def _text(self) -> bytes:
        """Without its end when it cannot be collected, which `gather` then tells."""
        try:
            return self._collect() + END
        except Exception as error:
            if not self._failed:
                log.error("metrics cannot be collected (%s; not logged again)", type(error).__name__)
            self._failed = True
            return b""

    def close(self) -> None:
        """The file goes too, unless the next process of that name has put its own there."""
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()


def register(directory: Path, name: str, collect: Callable[[], bytes]) -> Registration:
    """From now on `gather(directory)` includes what `collect` returns, in Prometheus' text format.

    The last one of a name replaces those before. Raises OSError when the folder is not ours alone, or the
    path is too long for a socket.
    """
    _own(directory)
    path = directory / f"{name}{SUFFIX}"
    # Under a name that nobody gathers until it listens, or it would be taken for dead.
    early = directory / f"{name}.{os.getpid()}"
    if len(os.fsencode(early)) > LONGEST_PATH:
        raise OSError(
            f"the path {str(early)!r} is too long for a Unix socket; set TMPDIR to a shorter folder"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with suppress(FileNotFoundError):
        early.unlink()
    listener.bind(str(early))
    early.chmod(0o600)
    listener.listen()
    early.rename(path)
    return Registration(listener, path, collect)


def _own(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise OSError(f"{str(directory)!r} is not a folder of this user alone (mode 0700); remove it")


def gather(
    directory: Path, timeout_s: float = TIMEOUT_S, clock: Callable[[], float] = time.monotonic
) -> bytes:
    """The merged text of every process that answers in time. What is left of dead ones is removed."""
    paths = sorted(directory.glob(f"*{SUFFIX}"))
    with ThreadPoolExecutor(READERS) as pool:
        texts = list(pool.map(lambda path: _ask(path, timeout_s, clock), paths))
    told = [(path.stem, text) for path, text in zip(paths, texts, strict=True) if text is not None]
    whole = [(name, text.removesuffix(END), text.endswith(END)) for name, text in told]
    return merge([*(text for _, text, up in whole if up), _up((name, up) for name, _, up in whole)])


def _ask(path: Path, timeout_s: float, clock: Callable[[], float]) -> bytes | None:
    """None when nobody is there; less than all when the answer did not come in time."""
    ends, parts = clock() + timeout_s, []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            while part := connection.recv(CHUNK_BYTES):
                parts.append(part)
                if (left := ends - clock()) <= 0:
                    raise TimeoutError
                connection.settimeout(left)
    except (ConnectionRefusedError, FileNotFoundError):
        path.unlink(missing_ok=True)
        return None
    except OSError:  # late, or broken off
        pass
    return b"".join(parts)


def _up(processes: Iterable[tuple[str, bool]]) -> bytes:
    name, label = UP.prometheus, INSTANCE.replace(".", "_")
    lines = [f'{name}{{{label}="{process}"}} {int(up)}' for process, up in processes]
    return "\n".join([f"# HELP {name} {UP.description}", f"# TYPE {name} gauge", *lines, ""]).encode()


def merge(texts: Iterable[bytes]) -> bytes:
    """One text in which each family comes once, with the samples of all."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        for family, head, lines in _families(text.decode()):
            heads.setdefault(family, head)
            samples.setdefault(family, []).extend(lines)
    merged = (line for family, head in heads.items() for line in (*head, *samples[family]))
    return "".join(f"{line}\n" for line in merged).encode()


def _families(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """(name, its HELP and TYPE lines, its samples) of each."""
    family, head, lines = "", list[str](), list[str]()
    for line in filter(None, text.split("\n")):  # not splitlines: names may hold other separators
        if line.startswith("# HELP "):
            if family:
                yield family, head, lines
            family, head, lines = line.split(" ", 3)[2], [line], []
        else:
            (head if line.startswith("#") else lines).append(line)
    if family:
        yield family, head, lines
