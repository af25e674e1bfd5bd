"""A draft worker in a process of its own, on a device whose passes take real time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess

import psutil

from gammaray.actors.link.channel import Address, connect, listen
from gammaray.actors.link.client import LIMITS, Limits, Link
from gammaray.actors.link.frames import Hello
from gammaray.actors.link.remote import RemoteDrafter
from gammaray.actors.link.serve import serve
from gammaray.actors.link.server import DraftServer
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.sim import Language, SimClock, SimDevice, StepCost

from .simlink import NAME, SECRET, Dialect

VOCAB, LENGTH = 24, 2048
PATIENCE_S = 60.0


class SleepClock(SimClock):
    """Real seconds; what takes time on the device is slept."""

    def __call__(self) -> float:
        return time.perf_counter()

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)


def device(language: Language, pass_s: float) -> SimDevice:
    return SimDevice(language, SleepClock(), StepCost(((1_000_000, pass_s),)), 4096)


def language() -> Language:
    return Language(VOCAB, LENGTH)


def _work(
    place: str | tuple[str, int], level_s: float, noise: float, overlap: bool, core: int | None
) -> None:
    if core is not None:
        psutil.Process().cpu_affinity([core])
    drafter = ModelDrafter(device(Dialect(language(), noise), level_s))
    server = DraftServer(drafter, VOCAB, NAME, SECRET)
    if not overlap:
        server.wants_time = lambda: False  # type: ignore[method-assign]
    parent = os.getppid()
    serve(listen(place), server, lambda: os.getppid() != parent, time.perf_counter)


@contextmanager
def worker(
    place: str | tuple[str, int],
    level_s: float = 0.001,
    noise: float = 0.15,
    overlap: bool = True,
    core: int | None = None,
) -> Iterator[BaseProcess]:
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=_work, args=(place, level_s, noise, overlap, core), daemon=True)
    process.start()
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGCONT)
        process.kill()
        process.join(10)


def remote(place: str | tuple[str, int], limits: Limits = LIMITS) -> RemoteDrafter:
    """Not connected yet: see `keep`."""
    address = Address(place, SECRET)
    link = Link(partial(connect, address, limits.silence_s), Hello(SECRET, VOCAB, NAME), limits)
    return RemoteDrafter(link, VOCAB)


def connected(drafter: RemoteDrafter) -> RemoteDrafter:
    """As soon as the worker listens."""
    deadline = time.monotonic() + PATIENCE_S
    while not drafter.link.up:
        assert time.monotonic() < deadline, "the worker does not come up"
        time.sleep(0.02)
        drafter.keep()
    return drafter
