"""What a step learns from: pieces of documents, of about the same length, side by side.

The order depends on the seed and nothing else, so a training that was stopped goes on with the very batches
that it would have had.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from gammaray.engine.hidden import of_layers
from gammaray.errors import ConfigError
from gammaray.training.corpus import Corpus
from gammaray.training.features import Cache

HELD_OUT = 20  # one document of so many is never learned from
SORTED = 32  # batches whose pieces are sorted by length together: little padding, and still a mixed order


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document, which is read as if it were a whole one."""

    document: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Batch:
    """B texts, padded at their ends with token 0 and states 0."""

    tokens: Tensor  # [B, T] int64
    answers: Tensor  # [B, T] bool: the target wrote it, so it is to be predicted; False where padded
    features: Tensor  # [B, T, L * H], the target's states behind each token
    layers: tuple[int, ...]  # whose these are, as `ModelRunner.forward_features` counts

    def states(self, layers: Sequence[int]) -> Tensor:
        """[B, T, len(layers) * H] of some of the layers."""
        if tuple(layers) == self.layers:
            return self.features
        found = of_layers(self.features.flatten(0, 1), self.layers, layers)  # [B * T, ...]
        return found.view(*self.tokens.shape, -1)


@dataclass(frozen=True, slots=True)
class Texts:
    """A corpus whose states are cached."""

    corpus: Corpus
    cache: Cache

    @property
    def layers(self) -> tuple[int, ...]:
        return self.cache.about.layers

    def learned(self) -> range | list[int]:
        """Documents that are learned from."""
        return [i for i in range(len(self.cache)) if i % HELD_OUT]

    def held_out(self) -> range:
        return range(0, len(self.cache), HELD_OUT)

    def pieces(self, documents: Sequence[int], longest: int) -> list[Piece]:
        """Of at most `longest` tokens, in order, without those too short to learn from."""
        ends, found = self.corpus.ends, []
        for document in documents:
            length = int(ends[document] - (ends[document - 1] if document else 0))
            starts = range(0, length, longest)
            found += [Piece(document, start, min(longest, length - start)) for start in starts]
        return [piece for piece in found if piece.length > 2]

    def batch(self, pieces: Sequence[Piece], device: torch.device) -> Batch:
        """As wide as the longest."""
        width = max(piece.length for piece in pieces)
        parts = [self._read(piece, width) for piece in pieces]
        tokens, answers, features = (torch.stack(column).to(device) for column in zip(*parts, strict=True))
        return Batch(tokens, answers, features, self.layers)

    def _read(self, piece: Piece, width: int) -> tuple[Tensor, Tensor, Tensor]:
        own = slice(piece.start, piece.start + piece.length)
        tokens, answers = self.corpus.document(piece.document)
        columns = tokens[own], answers[own], self.cache.document(piece.document)[own]
        padded = [x.new_zeros(width, *x.shape[1:]) for x in columns]
        for to, x in zip(padded, columns, strict=True):
            to[: piece.length] = x
        return padded[0], padded[1], padded[2]


def endless(pieces: Sequence[Piece], budget: int, seed: int) -> Iterator[list[Piece]]:
    """Batches of at most `budget` tokens, padding included, epoch after epoch. Raises ConfigError for no
    pieces."""
    if not pieces:
        raise ConfigError("there is nothing to learn from: write more documents")
    for epoch in count():
        yield from shuffled(pieces, budget, seed + 1_000_003 * epoch)


def shuffled(pieces: Sequence[Piece], budget: int, seed: int) -> list[list[Piece]]:
    """All pieces once, in the order of that seed."""
    draw = torch.Generator().manual_seed(seed)
    mixed = [pieces[i] for i in torch.randperm(len(pieces), generator=draw).tolist()]
    found: list[list[Piece]] = []
    while mixed:
        group = first(mixed, SORTED * budget)
        del mixed[: len(group)]
        found += fitted(group, budget)
    return [found[i] for i in torch.randperm(len(found), generator=draw).tolist()]


def fitted(pieces: Sequence[Piece], budget: int) -> list[list[Piece]]:
    """Sorted by length, as few batches as that makes. A piece that is too long has one of its own."""
    found: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        if found and (len(found[-1]) + 1) * found[-1][0].length <= budget:
            found[-1].append(piece)
        else:
            found.append([piece])
    return found


def first(pieces: Sequence[Piece], tokens: int) -> list[Piece]:
    """As many as have so many tokens; at least one."""
    taken = 0
    for index, piece in enumerate(pieces):
        taken += piece.length
        if taken >= tokens:
            return list(pieces[: index + 1])
    return list(pieces)
