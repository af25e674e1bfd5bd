"""How long a step of this target takes on this device, by the tokens that it feeds: measured at start-up."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import gcd
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gammaray.engine.batch import Row

REPEATS = 3  # the fastest one counts: what disturbed the others is not the device


@dataclass(frozen=True, slots=True)
class StepProfile:
    """SPS(B) of math.md section 3 as a table of (tokens fed, seconds of the step), ascending.

    Between two points it is linear; with `stepped` every batch is padded up to the next point. Beyond the
    last one a token costs what it costs there in the mean.
    """

    points: tuple[tuple[int, float], ...]
    stepped: bool = False

    def __post_init__(self) -> None:
        ascending = all(a < b and s <= t for (a, s), (b, t) in pairwise(self.points))
        if not self.points or not ascending or self.points[0][1] < 0:
            raise ValueError(
                f"{self.points} is no cost table: give (tokens, seconds) with ascending tokens, and seconds "
                "that start at 0 or more and never fall"
            )

    def seconds(self, tokens: int) -> float:
        """Up to the first point its cost."""
        above = bisect_left(self.points, tokens, key=lambda point: point[0])
        if above == len(self.points):
            last, most = self.points[-1]
            return most * tokens / last
        upper, most = self.points[above]
        if self.stepped or above == 0:
            return most
        lower, least = self.points[above - 1]
        return least + (most - least) * (tokens - lower) / (upper - lower)

    def sps(self, tokens: int) -> float:
        """Steps per second."""
        return 1 / self.seconds(tokens)

    def column(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """`seconds` of each [N]."""
        sizes, costs = np.array(self.points).T
        if self.stepped:
            found = costs[np.searchsorted(sizes, tokens).clip(max=len(sizes) - 1)]
        else:
            found = np.interp(tokens, sizes, costs)
        beyond: NDArray[np.float64] = np.where(tokens > sizes[-1], costs[-1] * tokens / sizes[-1], found)
        return beyond


class Target(Protocol):
    """The part of a ModelRunner that is measured."""

    num_blocks: int
    block_size: int
    vocab_size: int

    def forward(self, rows: Sequence[Row]) -> Tensor: ...


def measure(
    target: Target,
    most: int,
    clock: Callable[[], float] = time.perf_counter,
    repeats: int = REPEATS,
    padded: Sequence[int] = (),
    rows: int | None = None,
    wait: Callable[[], None] = lambda: None,
) -> StepProfile:
    """Passes over 1, 2, 4, ... and `most` tokens of sequences of a token each. Nothing may run yet.

    No token comes twice in a pass, as far as the vocabulary goes, and none is its sequence's first: experts
    of a mixture are chosen by token and context, and first tokens look all the same to them. So a larger
    pass touches as many more experts as it does in traffic, and SPS(B) includes what they cost.

    `padded`: what the target pads steps to, which is measured then, with `rows` sequences at most. `wait`:
    until what it was told is done. The KV that it writes is nobody's. Where a larger batch was faster,
    something disturbed the smaller one, which then counts as taking as long: SPS(B) never rises.
    """
    most = min(most, target.num_blocks * max(1, target.block_size - 1))
    edges = padded or [2**power for power in range(most.bit_length())]
    sizes = sorted({most, *(tokens for tokens in edges if tokens < most)})
    target.forward(_firsts(target, most, rows))  # also does what only the first pass does
    wait()
    timed = partial(_timed, target, clock=clock, wait=wait)
    rounds = [[timed(_rows(target, size, rows)) for size in sizes] for _ in range(repeats)]
    seconds = [min(times) for times in zip(*rounds, strict=True)]  # apart in time: disturbances last
    undisturbed = [*accumulate(reversed(seconds), min)][::-1]
    return StepProfile(tuple(zip(sizes, undisturbed, strict=True)), stepped=bool(padded))


def _timed(
    target: Target, rows: Sequence[Row], clock: Callable[[], float], wait: Callable[[], None]
) -> float:
    began = clock()
    target.forward(rows)
    wait()
    return clock() - began


def _count(target: Target, tokens: int, most: int | None) -> int:
    """Sequences that a pass over so many tokens is made of."""
    return min(tokens, target.num_blocks, tokens if most is None else most)


def _firsts(target: Target, tokens: int, most: int | None) -> list[Row]:
    """The token that each sequence begins with."""
    ids = _varied(target.vocab_size, _count(target, tokens, most))
    return [Row([token], 0, [row]) for row, token in enumerate(ids)]


def _rows(target: Target, tokens: int, most: int | None) -> list[Row]:
    """One token each, as decoding feeds them; several where there are not as many blocks, or `most` rows."""
    count = _count(target, tokens, most)
    fed = [tokens // count + (row < tokens % count) for row in range(count)]
    ids = iter(_varied(target.vocab_size, tokens))
    return [
        Row([next(ids) for _ in range(length)], 1, _blocks(target, row, 1 + length))
        for row, length in enumerate(fed)
    ]


def _varied(vocab_size: int, count: int) -> list[int]:
    """Token ids from all over a vocabulary, each about a golden section behind the last; the first
    `vocab_size` are distinct."""
    strides = range(max(1, round(0.618 * vocab_size)), 2 * vocab_size + 1)
    stride = next(stride for stride in strides if gcd(stride, vocab_size) == 1)
    return [(1 + place) * stride % vocab_size for place in range(count)]


def _blocks(target: Target, row: int, slots: int) -> list[int]:
    """Rows of several blocks may share some."""
    return [(row + i) % target.num_blocks for i in range(-(-slots // target.block_size))]
