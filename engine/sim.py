"""A device without a model, for simulated time (architecture.md, "Time and devices in tests").

`SimDevice` speaks ModelRunner. Its KV pool is a tape of tokens and positions, its logits a pseudo-random
function of the whole context, and each forward pass advances a `SimClock` by what a table says. The engine,
with that clock, then runs its real scheduler, verifier and bookkeeping at simulated speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gammaray.engine.batch import Row
from gammaray.engine.profile import StepProfile

LOGIT_ROWS = 1021  # contexts share so many rows of logits; prime
LOGIT_SCALE = 2.0  # standard deviation of a row
NEVER_WRITTEN = -1
LAST_WORD = 2**64 - 1

Words = NDArray[np.uint64]
Indices = NDArray[np.int64]


class SimClock:
    """Seconds that pass only when somebody says so. Stands in for time.perf_counter."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError(f"time cannot advance by {seconds} s; give a duration of 0 or more")
        self._now += seconds

    def advance_to(self, time: float) -> None:
        """Wait until `time`; nothing happens when that is past."""
        self._now = max(self._now, time)


class StepCost(StepProfile):
    """What a step of a simulated device costs."""

    def seconds(self, tokens: int) -> float:
        """Raises ValueError beyond the last point: nothing is free."""
        if tokens > self.points[-1][0]:
            raise ValueError(f"the cost table ends at {self.points[-1][0]} tokens; add a point for {tokens}")
        return super().seconds(tokens)


class Language:
    """What a simulated model would say: logits as a pseudo-random function of a context.

    A context is known by its digest, the sum modulo 2^64 of one word for each (token, position). So it grows
    by a token in constant time, and any other token or order anywhere gives another digest.
    """

    def __init__(self, vocab_size: int = 64, max_model_len: int = 8192, seed: int = 0) -> None:
        draws = np.random.default_rng(seed)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._weights = draws.integers(2**64, size=max_model_len, dtype=np.uint64) | np.uint64(1)
        rows = LOGIT_SCALE * draws.standard_normal((LOGIT_ROWS, vocab_size), dtype=np.float32)
        self._rows = torch.from_numpy(rows)

    def words(self, tokens: Sequence[int] | Indices, positions: Sequence[int] | Indices) -> Words:
        """What each token adds to a digest."""
        numbers = np.asarray(tokens, dtype=np.int64).astype(np.uint64) + np.uint64(1)
        return numbers * self._weights[np.asarray(positions, dtype=np.int64)]

    def extend(self, digest: int, position: int, tokens: Sequence[int]) -> int:
        """The digest of a context of `position` tokens with these behind it; that of none is 0."""
        words = self.words(tokens, range(position, position + len(tokens)))
        return (digest + int(words.sum(dtype=np.uint64))) & LAST_WORD

    def logits(self, digests: Sequence[int]) -> Tensor:
        """Of N contexts, [N, V] float32, a copy."""
        # The high half of a sum depends on all bits of its terms, the low half on their low bits only.
        rows = torch.tensor([(digest >> 32) % LOGIT_ROWS for digest in digests], dtype=torch.int64)
        return self._rows[rows]


class SimDevice:
    """Speaks ModelRunner. Reading a slot that was never written, or for another position, is an error."""

    dtype = torch.float32
    device = torch.device("cpu")
    num_layers = 1

    def __init__(
        self,
        language: Language,
        clock: SimClock,
        cost: StepCost,
        num_blocks: int = 1024,
        block_size: int = 16,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.language = language
        self.clock = clock
        self.cost = cost
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.eos_token_ids = eos_token_ids
        self.vocab_size = language.vocab_size
        self.max_model_len = language.max_model_len
        self._tokens: Indices = np.full(num_blocks * block_size, NEVER_WRITTEN, dtype=np.int64)
        self._positions = self._tokens.copy()

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Logits [N, V] in the order that `Row` describes. Costs time by the number of tokens fed."""
        layouts = [self._layout(row) for row in rows]
        written = [self._write(row, *layout) for row, layout in zip(rows, layouts, strict=True)]
        if len(np.unique(np.concatenate(written))) != (fed := sum(map(len, written))):
            raise RuntimeError("two tokens of one pass were written to one slot: two tables share it")
        digests = [d for row, layout in zip(rows, layouts, strict=True) for d in self._read(row, *layout)]
        self.clock.advance(self.cost.seconds(fed))
        return self.language.logits(digests)

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy slots; the two may overlap. A token moves to the slot of its own position."""
        if src:
            for tape in (self._tokens, self._positions):
                tape[list(dst)] = tape[list(src)]

    def dense(self, tokens: Sequence[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """One whole sequence without pages and without cost: logits [T, V]; k and v as `read_kv`."""
        positions = np.arange(len(tokens))
        logits = self.language.logits(_prefixes(self.language.words(tokens, positions)))
        return logits, [(_as_kv(np.array(tokens)), _as_kv(positions))]

    def read_kv(self, slots: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Tokens as k and positions as v, [N, 1, 1] each."""
        return [(_as_kv(self._tokens[list(slots)]), _as_kv(self._positions[list(slots)]))]

    def _layout(self, row: Row) -> tuple[Indices, Indices]:
        """Physical slot and position of all that the row sees or feeds."""
        depths: list[int] = []
        for parent in row.tree_parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        logical = np.arange(row.tree_start + len(depths))
        blocks, offsets = np.divmod(logical, self.block_size)
        logical[row.tree_start :] = [row.tree_start - 1 + depth for depth in depths]
        return np.asarray(row.blocks)[blocks] * self.block_size + offsets, logical

    def _write(self, row: Row, slots: Indices, positions: Indices) -> Indices:
        """Returns the slots written."""
        first = row.start + row.fed
        self._tokens[slots[first:]] = [*row.pending, *row.tree_tokens[row.fed :]]
        self._positions[slots[first:]] = positions[first:]
        return slots[first:]

    def _read(self, row: Row, slots: Indices, positions: Indices) -> list[int]:
        """Digests of the contexts whose logits are wanted, read back through the block table."""
        self._check(slots, positions)
        words = self.language.words(self._tokens[slots], positions)
        chain = _prefixes(words[: row.tree_start])
        nodes: list[int] = []
        for word, parent in zip(words[row.tree_start :].tolist(), row.tree_parents, strict=True):
            nodes.append(((nodes[parent] if parent >= 0 else chain[-1]) + word) & LAST_WORD)
        first = len(chain) - min(row.logits, len(row.pending))
        return [*chain[first:], *nodes[row.fed :]] if row.logits else []

    def _check(self, slots: Indices, positions: Indices) -> None:
        wrong = np.flatnonzero(self._positions[slots] != positions)
        if len(wrong):
            held, wanted = int(self._positions[slots[wrong[0]]]), int(positions[wrong[0]])
            found = "was never written" if held == NEVER_WRITTEN else f"holds position {held}"
            raise RuntimeError(f"slot {int(slots[wrong[0]])}, read for position {wanted}, {found}")


def _prefixes(words: Words) -> list[int]:
    """The digest behind each token."""
    digests: list[int] = np.cumsum(words, dtype=np.uint64).tolist()
    return digests


def _as_kv(values: Indices) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))[:, None, None]
