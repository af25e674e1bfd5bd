"""Times on a CUDA device: medians of events around a captured call, the L2 cache flushed between calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from gammaray.kernels.bench.case import Roofs

FEWEST, MOST = 5, 30  # calls of one median
SPENT_US = 60_000.0  # on the calls of one median, about
FLUSHED = 256 * 2**20  # bytes; H200: 50 MB of L2, B200: 126 MB


class Timer(Protocol):
    def __call__(self, run: Callable[[], object]) -> float:
        """Median microseconds of `run`."""


class CudaTimer:
    """Captures the call in a CUDA graph, as serving does, so that the host's part is not in the time.

    What cannot be captured is timed as it is, launches included.
    """

    def __init__(self, device: torch.device) -> None:
        self._cache = torch.empty(FLUSHED, dtype=torch.int8, device=device)

    def __call__(self, run: Callable[[], object]) -> float:
        for _ in range(3):  # compiles, allocates
            run()
        torch.cuda.synchronize()
        replay = _captured(run) or run
        first = self._once(replay)
        count = int(min(max(SPENT_US / first, FEWEST), MOST))
        return statistics.median(self._once(replay) for _ in range(count))

    def _once(self, run: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._cache.zero_()  # also keeps the device busy while the host queues what follows
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3


def _captured(run: Callable[[], object]) -> Callable[[], None] | None:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def roofs(timer: Timer, device: torch.device, copied: int = 2 * 2**30, side: int = 8192) -> Roofs:
    """Copies `copied` bytes and multiplies two bfloat16 matrices of `side`."""
    source = torch.zeros(copied, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    x, y = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(x)
    copy_us = timer(lambda: target.copy_(source))
    return Roofs(2 * copied / copy_us, 2 * side**3 / timer(lambda: _multiply(x, y, product)))


def _multiply(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    return torch.mm(x, y, out=out)
