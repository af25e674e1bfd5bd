"""What heads learn from: documents of tokens, and which of these the target wrote itself.

A corpus is a folder of shards 000000, 000001, ... Each is a folder of three arrays, one behind the other as
they lie in memory: `tokens.u32`; `answers.u8`, 1 where the target wrote the token, so that loss counts;
`ends.i64`, behind the last token of each document. A shard comes into being as a whole and never changes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gammaray.errors import ConfigError
from gammaray.training.files import replacing

TOKENS, ANSWERS, ENDS = ("tokens.u32", "<u4"), ("answers.u8", "u1"), ("ends.i64", "<i8")


@dataclass(frozen=True, slots=True)
class Document:
    tokens: tuple[int, ...]
    answers: tuple[bool, ...]  # of each token, whether the target wrote it

    @classmethod
    def answered(cls, asked: Sequence[int], answer: Sequence[int]) -> Document:
        return cls((*asked, *answer), (*[False] * len(asked), *[True] * len(answer)))


@dataclass(frozen=True, slots=True)
class Shard:
    tokens: NDArray[np.uint32]  # [T]
    answers: NDArray[np.uint8]  # [T]
    ends: NDArray[np.int64]  # [documents]

    def span(self, index: int) -> slice:
        """Where a document of the shard lies."""
        return slice(int(self.ends[index - 1]) if index else 0, int(self.ends[index]))


class Corpus:
    """Documents by their number, which stays theirs while shards are added. Nothing is read before it is
    asked for."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        self._behind = list(accumulate(len(shard.ends) for shard in shards))  # documents, shard by shard
        bases = [0, *accumulate(len(shard.tokens) for shard in shards)]
        ends = [shard.ends + base for shard, base in zip(shards, bases, strict=False)]
        self.ends: NDArray[np.int64] = np.concatenate(ends) if ends else np.zeros(0, np.int64)
        self.tokens = bases[-1]  # in all

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Of a folder without shards, or that is not there: an empty one. Raises ConfigError."""
        return cls([_read(shard) for shard in shards_of(folder)])

    def first(self, tokens: int | None) -> Corpus:
        """The shards at the beginning that have so many tokens of the target's, if all have; None: all."""
        if tokens is None:
            return self
        behind = list(accumulate(int(shard.answers.sum()) for shard in self.shards))
        return Corpus(self.shards[: bisect_left(behind, tokens) + 1])

    def __len__(self) -> int:
        return len(self.ends)

    def document(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens [T] int64, and [T] bool: written by the target. Raises IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        number = bisect_right(self._behind, index)
        shard = self.shards[number]
        span = shard.span(index - (self._behind[number - 1] if number else 0))
        tokens, answers = shard.tokens[span].astype(np.int64), shard.answers[span].astype(np.bool_)
        return torch.from_numpy(tokens), torch.from_numpy(answers)

    def length(self, index: int) -> int:
        """Tokens of a document."""
        return int(self.ends[index]) - (int(self.ends[index - 1]) if index else 0)

    def counts(self, vocab_size: int) -> Tensor:
        """How often the target wrote each token: [V] int64. Raises ConfigError for tokens that are none."""
        total = np.zeros(vocab_size, np.int64)
        for number, shard in enumerate(self.shards):
            if shard.tokens.max(initial=0) >= vocab_size:
                raise ConfigError(
                    f"shard {number:06} is damaged: remove the folder of the data and run again"
                )
            total += np.bincount(shard.tokens[shard.answers == 1], minlength=vocab_size)
        return torch.from_numpy(total)


def seal(folder: Path, documents: Iterable[Document]) -> None:
    """Append a shard, which may be empty: it then says that nothing came of a wave."""
    found = list(documents)
    columns: list[tuple[tuple[str, str], list[int]]] = [
        (TOKENS, [token for document in found for token in document.tokens]),
        (ANSWERS, [int(own) for document in found for own in document.answers]),
        (ENDS, list(accumulate(len(document.tokens) for document in found))),
    ]
    with replacing(folder / f"{len(shards_of(folder)):06}") as work:
        work.mkdir()
        for (name, kind), values in columns:
            np.asarray(values, kind).tofile(work / name)


def shards_of(folder: Path) -> list[Path]:
    """In order. Raises ConfigError when one is missing between others."""
    found = sorted(path for path in folder.glob("[0-9]*") if path.is_dir())
    if [path.name for path in found] != [f"{number:06}" for number in range(len(found))]:
        raise ConfigError(f"{folder} lacks a shard before {found[-1].name}: remove the folder and run again")
    return found


def _read(folder: Path) -> Shard:
    try:
        shard = Shard(*(_column(folder / name, kind) for name, kind in (TOKENS, ANSWERS, ENDS)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read shard {folder}: {error}: remove the corpus and run again") from error
    sizes = {len(shard.tokens), len(shard.answers), int(shard.ends[-1]) if len(shard.ends) else 0}
    if len(sizes) > 1 or (np.diff(shard.ends, prepend=0) <= 0).any():
        raise ConfigError(f"shard {folder} is damaged, its arrays disagree: remove the corpus and run again")
    return shard


def _column(file: Path, kind: str) -> NDArray[Any]:
    """Mapped, not read; no file of no bytes can be mapped."""
    return np.memmap(file, kind, "r") if file.stat().st_size else np.zeros(0, kind)
