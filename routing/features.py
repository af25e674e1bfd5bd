"""What a router knows of a request before its first draft, as numbers for the acceptance predictor.

Names become stable buckets: trees cut a number line, so a bucket a name is all they need. A feature that is
not to be had is NaN, which trees know how to take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

WINDOW = 64  # tokens of the prompt's head, and of its tail; what lies between is never read
DIMS = 8  # of the projected embeddings, see gammaray.engine.projection
FEW = 8  # tokens whose mean embedding would tell which they are
BUCKETS = 256
NAMES = (
    "log_length",
    *(f"{part}_{what}" for part in ("head", "tail") for what in ("distinct", "bigrams", "repeat")),
    "temperature",
    "route",
    "request_class",
    "drafter",
    "prior",
    *(f"embedding_{i}" for i in range(DIMS)),
)
WIDTH = len(NAMES)
PRIOR = NAMES.index("prior")

_LATER = np.arange(1, WINDOW)[:, None] + np.arange(WINDOW)  # [d - 1, i] = i + d
_UNKNOWN = (math.nan,) * DIMS


def features(
    prompt: Sequence[int],
    temperature: float,
    route: str,
    request_class: str,
    drafter: str | None,
    prior: float | None,
    table: NDArray[np.float16] | None = None,
) -> tuple[float, ...]:
    """[WIDTH] numbers in the order of NAMES, finite or NaN, in a time that does not grow with the prompt.

    `prior` is the acceptance of the request's key so far (`learning.Priors`), `table` [V, DIMS] the projected
    embeddings of the target's vocabulary; None where there is none.
    """
    head, tail = prompt[:WINDOW], prompt[-WINDOW:]
    return (
        math.log1p(len(prompt)),
        *repetition(head),
        *repetition(tail),
        temperature,
        bucket(route),
        bucket(request_class),
        bucket(drafter),
        math.nan if prior is None else prior,
        *_meaning(head, tail, table),
    )


def bucket(name: str | None) -> float:
    """The same in every process and release; NaN for None."""
    return math.nan if name is None else float(crc32(name.encode()) % BUCKETS)


def repetition(tokens: Sequence[int]) -> tuple[float, float, float]:
    """Of at most WINDOW tokens: share of distinct ones, share of bigrams that came before, and length of the
    longest run that occurs twice (overlaps count) over the longest possible. NaN where there are too few.
    """
    count = len(tokens)
    if count < 2:
        return 1.0 if count else math.nan, math.nan, math.nan
    bigrams = len(set(pairwise(tokens)))
    return len(set(tokens)) / count, 1 - bigrams / (count - 1), _longest_repeat(tokens) / (count - 1)


def _longest_repeat(tokens: Sequence[int]) -> int:
    """Row d - 1 of `same` compares each token with the one d later; a run of hits is a repeat."""
    early, late = np.full(WINDOW, -2), np.full(2 * WINDOW, -1)  # paddings that equal nothing
    early[: len(tokens)] = late[: len(tokens)] = tokens
    same = late[_LATER] == early  # [WINDOW - 1, WINDOW]; the last column is False: no run spans two rows
    ends = np.flatnonzero(~same)
    return int(np.diff(ends, prepend=-1).max()) - 1


def _meaning(head: Sequence[int], tail: Sequence[int], table: NDArray[np.float16] | None) -> Sequence[float]:
    """The mean of the tokens' rows of `table`. An id beyond it is for others to refuse."""
    if table is None or len(head) < FEW:
        return _UNKNOWN
    rows = table.take([*head, *tail], axis=0, mode="clip")
    mean: list[float] = rows.mean(0, dtype=np.float32).tolist()
    return mean
