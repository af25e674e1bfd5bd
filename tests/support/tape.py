"""A model without a network, for the engine's bookkeeping.

Its KV pool stores each token and its position. Logits are a pseudo-random function of the *whole* context
that is read back through the block table and the ancestors, so one stale, missing or misplaced slot anywhere
changes the output. Fast enough for property tests over thousands of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from gammaray.engine.batch import Row

EMPTY = (-1, -1)


class TapeRunner:
    """Speaks ModelRunner. Two tapes of one `language` but different `noise` agree often, not always."""

    dtype = torch.float32
    device = torch.device("cpu")
    num_layers = 1

    def __init__(
        self,
        vocab: int = 8,
        blocks: int = 32,
        block_size: int = 4,
        max_model_len: int = 64,
        language: int = 0,
        noise: float = 0.0,
    ) -> None:
        self.vocab_size = vocab
        self.num_blocks = blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.language = language
        self.noise = noise
        self.tape: list[tuple[int, int]] = [EMPTY] * (blocks * block_size)
        self.forwards = 0

    def forward(self, rows: Sequence[Row]) -> Tensor:
        self.forwards += 1
        written = [slot for row in rows for slot in self._write(row)]
        assert len(written) == len(set(written)), "two rows wrote one slot"
        return torch.tensor(np.array([logits for row in rows if row.logits for logits in self._read(row)]))

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        values = [self.tape[slot] for slot in src]
        for slot, value in zip(dst, values, strict=True):
            # A node moves to the slot of its own position; the position itself never changes.
            self.tape[slot] = value

    def dense(self, tokens: Sequence[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        logits = [self._logits(tuple(tokens[: i + 1])) for i in range(len(tokens))]
        return torch.tensor(np.array(logits)), [_as_kv(list(zip(tokens, range(len(tokens)), strict=True)))]

    def read_kv(self, slots: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        return [_as_kv([self.tape[slot] for slot in slots])]

    def _slot(self, row: Row, logical: int) -> int:
        return row.blocks[logical // self.block_size] * self.block_size + logical % self.block_size

    def _write(self, row: Row) -> list[int]:
        tree_start = row.start + len(row.pending)
        depths: list[int] = []
        for parent in row.tree_parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        fed = [(row.start + i, token, row.start + i) for i, token in enumerate(row.pending)]
        fed += [
            (tree_start + node, row.tree_tokens[node], tree_start - 1 + depths[node])
            for node in range(row.fed, len(row.tree_tokens))
        ]
        for logical, token, position in fed:
            assert position < self.max_model_len
            self.tape[self._slot(row, logical)] = (token, position)
        return [self._slot(row, logical) for logical, _, _ in fed]

    def _read(self, row: Row) -> list[np.ndarray]:
        tree_start = row.start + len(row.pending)
        ends = range(max(row.start, tree_start - row.logits) + 1, tree_start + 1)
        last = [self._context(row, range(end)) for end in ends]
        paths: list[list[int]] = []
        for node, parent in enumerate(row.tree_parents):
            paths.append([*(paths[parent] if parent >= 0 else []), tree_start + node])
        contexts = last + [self._context(row, [*range(tree_start), *path]) for path in paths[row.fed :]]
        return [self._logits(context) for context in contexts]

    def _context(self, row: Row, logical: Sequence[int]) -> tuple[int, ...]:
        """Tokens in position order; a slot that holds another position's KV breaks the context."""
        found = [self.tape[self._slot(row, slot)] for slot in logical]
        return tuple(token if position == at else -7 for at, (token, position) in enumerate(found))

    def _logits(self, context: tuple[int, ...]) -> np.ndarray:
        return _logits(context, self.vocab_size, self.language, self.noise)


@lru_cache(maxsize=200_000)
def _logits(context: tuple[int, ...], vocab: int, language: int, noise: float) -> np.ndarray:
    """Mostly the last two tokens, and a little of everything before."""
    near = _normal((language, *context[-2:]), vocab)
    far = _normal((language, 1, *context), vocab)
    own = _normal((language, 2, *context), vocab)
    return (2.0 * near + 0.5 * far + noise * own).astype(np.float32)


def _normal(key: tuple[int, ...], size: int) -> np.ndarray:
    return np.random.default_rng([value + 8 for value in key]).normal(size=size)


def _as_kv(entries: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    flat = torch.tensor(entries, dtype=torch.float32).reshape(-1, 2, 1, 1)
    return flat[:, 0], flat[:, 1]


class Letters:
    """Token i is the i-th letter."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


class Pieces:
    """Tokens are byte strings, which may begin or end inside a character."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")
