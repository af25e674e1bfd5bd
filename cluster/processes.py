"""The processes of a Ray cluster of our own, and that none of them outlives us."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil

END_S = 5.0  # for processes to end
ROUNDS = 3
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@contextmanager
def none_left() -> Iterator[set[psutil.Process]]:
    """Ends what is started inside; after a failure at once.

    Half-started parts of Ray would live on for a minute, trying to connect. What is put into the set counts
    as started inside.
    """
    adopt_orphans()
    before, seen, seconds = descendants(), set[psutil.Process](), 0.0
    try:
        yield seen
        seconds = END_S
    finally:
        for _ in range(ROUNDS):  # what dies may leave children that were not seen before
            end([p for p in (seen | descendants()) - before if p.is_running()], seconds)


def adopt_orphans() -> None:
    """Makes what a child of ours leaves behind a child of ours, where the system can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> set[psutil.Process]:
    """Every process below this one."""
    return set(psutil.Process().children(recursive=True))


def end(processes: Iterable[psutil.Process], seconds: float) -> None:
    """Waits so long for them to end, then kills those that did not."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    kill(alive)
    psutil.wait_procs(alive, timeout=END_S)


def kill(processes: Iterable[psutil.Process]) -> None:
    """Without a chance to clean up."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
