"""Which of the target's texts are worth learning from: no loops, nothing too short, nothing twice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FEWEST = 8  # tokens of an answer
LONGEST_PERIOD = 64
PROOF = 24  # tokens that repeat what stands a period before; a list or a table has fewer
SHINGLE = 8  # tokens
SAMPLED = 4  # one shingle in so many is remembered
TWICE = 0.5  # of the shingles that were seen before: more, and the text is a copy
FACTORS = np.random.default_rng(0).integers(2**64, size=SHINGLE, dtype=np.uint64) | np.uint64(1)
Tokens = NDArray[np.uint64]


def before_loop(tokens: Sequence[int]) -> int:
    """How many tokens come before the text only repeats itself; all, if it never does.

    Small models end in loops. The first turn of one is kept: it is what the target says.
    """
    text = np.asarray(tokens)
    return min((_proven(text, period) for period in range(1, LONGEST_PERIOD + 1)), default=len(text))


def _proven(text: NDArray[np.int64], period: int) -> int:
    """Where it is known that the text repeats itself with a period; its length when it does not."""
    need = max(PROOF, 2 * period)  # three turns at least
    same = np.cumsum(np.concatenate([[0], text[period:] == text[:-period]]))
    if len(same) <= need:
        return len(text)
    runs = np.flatnonzero(same[need:] - same[:-need] == need)
    return int(runs[0]) + period if len(runs) else len(text)


class Seen:
    """Remembers texts by a sample of their shingles (Broder 1997), the same for equal texts in any order."""

    def __init__(self) -> None:
        self._shingles: set[int] = set()

    def add(self, tokens: Sequence[int]) -> bool:
        """Whether the text is new; then it is remembered."""
        own = _sketch(np.asarray(tokens, np.uint64))
        if len(own & self._shingles) > TWICE * len(own):
            return False
        self._shingles |= own
        return True


def _sketch(text: Tokens) -> set[int]:
    """Hashes of a sample of all runs of eight tokens; of a text without any in the sample, its own."""
    padded = np.concatenate([text, np.zeros(max(0, SHINGLE - len(text)), np.uint64)]) + np.uint64(1)
    runs = np.lib.stride_tricks.sliding_window_view(padded, SHINGLE)  # [N, 8]
    hashes = (runs * FACTORS).sum(1, dtype=np.uint64)
    mixed = hashes ^ (hashes >> np.uint64(29))
    sampled = mixed[mixed % np.uint64(SAMPLED) == 0]
    return set((sampled if len(sampled) else mixed).tolist())
