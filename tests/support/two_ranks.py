"""A tiny target on two ranks: rank 0 in this process, rank 1 in another one."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from transformers import PreTrainedModel

from gammaray.engine.batch import Row
from gammaray.engine.loading import load_runner
from gammaray.engine.parallel import ParallelRunner, obey
from gammaray.engine.peers import Link
from gammaray.engine.ranks import Meeting, host, join

PROCESSES = multiprocessing.get_context("forkserver")  # so that torch is imported once for all of them
PROCESSES.set_forkserver_preload(["gammaray.engine.build", "transformers.models.llama.modeling_llama"])

Make = Callable[[], PreTrainedModel]


def start(work: Callable[..., None], *args: object) -> BaseProcess:
    """`work` of an importable module in another process, which ends with this one at the latest."""
    process = PROCESSES.Process(target=work, args=args, daemon=True)
    process.start()
    return process


def follow(make: Make, meeting: Meeting, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    link = Link(join(meeting, 1))
    obey(load_runner(link.together(make), ranks=link, **options), link)


def broken() -> PreTrainedModel:
    raise OSError("no such model here")


def lead(make: Make, meetings: Any, options: dict[str, Any]) -> None:
    """Rank 0 as a process: tells its meeting, then the time of each step, without an end."""
    torch.set_num_threads(1)
    seat = host(2)
    meetings.send(seat.meeting)
    link = Link(seat)
    runner = load_runner(link.together(make), ranks=link, **options)
    while True:
        runner.forward([Row([1, 2, 3], 0, [0])])
        meetings.send(time.monotonic())


@contextmanager
def two_ranks(
    make: Make, timeout_s: float = 30.0, **options: Any
) -> Iterator[tuple[ParallelRunner, BaseProcess]]:
    """The runner of rank 0, and the process of rank 1, which must end by itself after that."""
    seat = host(2, timeout_s=timeout_s)
    process = start(follow, make, seat.meeting, options)
    try:
        link = Link(seat)
        runner = load_runner(link.together(make), ranks=link, **options)
        assert isinstance(runner, ParallelRunner)
        yield runner, process
        runner.close()
        process.join(10)
        assert process.exitcode is not None, "rank 1 did not end"
    finally:
        process.kill()
        process.join()
