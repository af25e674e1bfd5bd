"""Both runs of `make chaos`: each stream in peace, and all at once with their troubles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import psutil
from chaos_requests import Case
from chaos_stream import Heard, listen
from server import Server

REPLICA = "ray::ServeReplica:gammaray:target"
CALM = 12  # requests at once in the undisturbed run
KILL_AFTER = 0.15  # of all streams are done
AWAY_S = 0.5  # after the kill, some readers leave
POLL_S = 0.05


@dataclass(slots=True)
class Kill:
    """`at` in s of the monotonic clock, the rest in s from there."""

    at: float
    process_s: float = 0.0  # until there was a new replica process
    ready_s: float = 0.0  # until it answered


@dataclass(slots=True)
class Run:
    """What all readers heard, by case."""

    heard: list[Heard]
    seconds: float = 0.0
    kill: Kill | None = None
    killed: asyncio.Event = field(default_factory=asyncio.Event)


async def undisturbed(http: httpx.AsyncClient, cases: Sequence[Case], keys: Mapping[str, str]) -> Run:
    run, places, began = Run([Heard() for _ in cases]), asyncio.Semaphore(CALM), time.monotonic()

    async def one(case: Case, heard: Heard) -> None:
        async with places:
            await listen(http, case.path, case.body, keys[case.tenant], heard)

    await asyncio.gather(*map(one, cases, run.heard))
    run.seconds = time.monotonic() - began
    return run


async def disturbed(
    http: httpx.AsyncClient, server: Server, cases: Sequence[Case], keys: Mapping[str, str], kill: bool
) -> Run:
    """Raises RuntimeError when no replica could be killed."""
    run, began = Run([Heard() for _ in cases]), time.monotonic()
    killer = asyncio.create_task(kill_replica(http, server, run)) if kill else None
    await asyncio.gather(*(troubled(http, case, keys[case.tenant], run) for case in cases))
    run.seconds = time.monotonic() - began
    if killer:
        await killer
    return run


async def troubled(http: httpx.AsyncClient, case: Case, key: str, run: Run) -> None:
    """One stream, until its end or until its reader leaves."""
    heard, trouble = run.heard[case.index], case.trouble
    body = case.body if trouble.timeout_s is None else {**case.body, "timeout": trouble.timeout_s}
    stream = asyncio.create_task(listen(http, case.path, body, key, heard, trouble.leaves_after_events))
    leaving = asyncio.create_task(until_left(case, run))
    await asyncio.wait({stream, leaving}, return_when=asyncio.FIRST_COMPLETED)
    heard.left |= not stream.done()
    for task in (stream, leaving):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until_left(case: Case, run: Run) -> None:
    if case.trouble.leaves_after_s is not None:
        await asyncio.sleep(case.trouble.leaves_after_s)
    elif case.trouble.leaves_after_kill:
        await run.killed.wait()
        await asyncio.sleep(AWAY_S)
    else:
        await asyncio.Event().wait()


async def kill_replica(http: httpx.AsyncClient, server: Server, run: Run) -> None:
    """Kills it in the middle of the run, and sees how long a new one takes."""
    while sum(heard.done for heard in run.heard) < KILL_AFTER * len(run.heard):
        await asyncio.sleep(POLL_S)
    if (victim := replica(server)) is None:
        raise RuntimeError(f"no process is called {REPLICA}")
    victim.kill()
    kill = run.kill = Kill(time.monotonic())
    run.killed.set()
    while (new := replica(server)) is None or new == victim:
        await asyncio.sleep(POLL_S)
    kill.process_s = time.monotonic() - kill.at
    while (await http.get("/readyz")).status_code != 200:
        await asyncio.sleep(POLL_S)
    kill.ready_s = time.monotonic() - kill.at


def replica(server: Server) -> psutil.Process | None:
    for process in server.family():
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith(REPLICA):
                return process
    return None
