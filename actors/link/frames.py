"""What goes over a draft link: length-prefixed binary frames, little-endian, no pickle.

    client -> worker   HELLO, DRAFT (changes of sequences, then views), PING
    worker -> client   WELCOME or REFUSED, TREES, PONG

Every frame begins with its kind, the generation of the link and a number that the answer repeats, so that
late answers and those of an earlier link are told apart. A sequence is a handle, an integer of the client's.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import torch

from gammaray.engine.drafters.base import DraftTree, DraftView, Drawn
from gammaray.errors import GammarayError
from gammaray.types import SamplingParams

PROTOCOL = 1
HEAD = struct.Struct("<BIQ")  # kind, generation, number
VIEW = struct.Struct("<IIBBBdIddQI")
TREE = struct.Struct("<IIBBBB")
DRAWN: tuple[Drawn, ...] = ("deterministic", "iid", "without_replacement")


class MalformedFrame(GammarayError):
    """The other end does not speak this protocol, or bytes were lost."""


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    DRAFT = 4
    TREES = 5
    PING = 6
    PONG = 7


class Change(IntEnum):
    """Of a sequence at the worker."""

    BEGIN = 0  # make it equal to these tokens
    APPEND = 1  # behind `length` tokens that it has
    RELEASE = 2


@dataclass(frozen=True, slots=True)
class Hello:
    """`secret` is what the worker was started with; the rest must fit its drafter."""

    secret: bytes
    vocab_size: int
    drafter: str
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class Update:
    """`length`: tokens that the sequence has before; only counts for APPEND."""

    change: Change
    handle: int
    length: int = 0
    tokens: tuple[int, ...] = ()
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Asked:
    """A view, by handle."""

    handle: int
    view: DraftView


@dataclass(frozen=True, slots=True)
class Trees:
    """Drafts by handle, for sequences of this length. `stale`: handles to begin again. `hits`: how many of
    the drafts had been made ahead."""

    trees: dict[int, tuple[int, DraftTree]] = field(default_factory=dict)
    stale: tuple[int, ...] = ()
    hits: int = 0


class Writer:
    """Grows a frame."""

    def __init__(self, kind: Kind, generation: int, number: int) -> None:
        self._parts = [HEAD.pack(kind, generation, number)]

    def put(self, layout: struct.Struct | str, *values: object) -> None:
        packer = struct.Struct(f"<{layout}") if isinstance(layout, str) else layout
        self._parts.append(packer.pack(*values))

    def raw(self, data: bytes) -> None:
        self.put("I", len(data))
        self._parts.append(data)

    def integers(self, values: Sequence[int]) -> None:
        self.raw(array("I", values).tobytes())

    def done(self) -> bytes:
        return b"".join(self._parts)


class Reader:
    """Reads a frame. Raises MalformedFrame where it ends too early."""

    def __init__(self, frame: bytes) -> None:
        self._frame, self._at = frame, 0
        kind, self.generation, self.number = self.take(HEAD)
        if kind not in set(Kind):
            raise MalformedFrame(f"a frame of unknown kind {kind}")
        self.kind = Kind(kind)

    def take(self, layout: struct.Struct | str) -> tuple[int, ...]:
        packer = struct.Struct(f"<{layout}") if isinstance(layout, str) else layout
        return packer.unpack(self._bytes(packer.size))

    def raw(self) -> bytes:
        (size,) = self.take("I")
        return self._bytes(size)

    def integers(self) -> tuple[int, ...]:
        data = self.raw()
        if len(data) % 4:
            raise MalformedFrame("a frame with a broken list")
        return tuple(array("I", data))

    def rest(self) -> bool:
        return self._at < len(self._frame)

    def _bytes(self, size: int) -> bytes:
        if self._at + size > len(self._frame):
            raise MalformedFrame("a frame ends too early")
        self._at += size
        return self._frame[self._at - size : self._at]


def pack_hello(hello: Hello, generation: int) -> bytes:
    writer = Writer(Kind.HELLO, generation, 0)
    writer.put("HI", hello.protocol, hello.vocab_size)
    writer.raw(hello.secret)
    writer.raw(hello.drafter.encode())
    return writer.done()


def read_hello(reader: Reader) -> Hello:
    protocol, vocab_size = reader.take("HI")
    return Hello(reader.raw(), vocab_size, reader.raw().decode("utf-8", "replace"), protocol)


def pack_text(kind: Kind, generation: int, number: int, text: str = "") -> bytes:
    """WELCOME, REFUSED with its reason, PING, PONG."""
    writer = Writer(kind, generation, number)
    writer.raw(text.encode())
    return writer.done()


def pack_draft(generation: int, number: int, updates: Sequence[Update], asked: Sequence[Asked]) -> bytes:
    writer = Writer(Kind.DRAFT, generation, number)
    writer.put("I", len(updates))
    for update in updates:
        writer.put("BII", update.change, update.handle, update.length)
        writer.raw(update.salt)
        writer.integers(update.tokens)
    writer.put("I", len(asked))
    for one in asked:
        view, sampling = one.view, one.view.sampling
        seed = sampling.seed & (1 << 64) - 1
        shape = one.handle, view.length, view.depth, view.width, view.coupled
        writer.put(VIEW, *shape, *_law(sampling), seed, view.sequence)
    return writer.done()


def _law(sampling: SamplingParams) -> tuple[float, int, float, float]:
    """What a drafter's own distribution depends on."""
    return sampling.temperature, min(sampling.top_k, 2**32 - 1), sampling.top_p, sampling.min_p


def read_draft(reader: Reader) -> tuple[list[Update], list[Asked]]:
    """Raises MalformedFrame."""
    updates = list(_updates(reader))
    asked = []
    for _ in range(reader.take("I")[0]):
        handle, length, depth, width, coupled, *law, seed, sequence = reader.take(VIEW)
        sampling = SamplingParams(law[0], int(law[1]), law[2], law[3], seed=seed)
        asked.append(Asked(handle, DraftView("", length, depth, width, sampling, sequence, bool(coupled))))
    return updates, asked


def _updates(reader: Reader) -> Iterator[Update]:
    for _ in range(reader.take("I")[0]):
        change, handle, length = reader.take("BII")
        if change not in set(Change):
            raise MalformedFrame(f"a change of unknown kind {change}")
        salt = reader.raw()
        yield Update(Change(change), handle, length, reader.integers(), salt)


def pack_trees(generation: int, number: int, found: Trees) -> bytes:
    writer = Writer(Kind.TREES, generation, number)
    writer.put("II", found.hits, len(found.trees))
    for handle, (length, tree) in found.trees.items():
        columns = 0 if tree.q_ids is None else tree.q_ids.shape[1]
        sure = tree.confidence is not None
        writer.put(TREE, handle, length, len(tree), DRAWN.index(tree.drawn), columns, sure)
        writer.integers(tree.tokens)
        writer.raw(array("b", tree.parents).tobytes())
        if tree.q_ids is not None and tree.q_probs is not None:
            writer.raw(tree.q_ids.to(torch.int32).numpy().tobytes())
            writer.raw(tree.q_probs.float().numpy().tobytes())
        if tree.confidence is not None:
            writer.raw(array("d", tree.confidence).tobytes())
    writer.integers(found.stale)
    return writer.done()


def read_trees(reader: Reader) -> Trees:
    """Raises MalformedFrame. Whether the trees are such is the engine's to check."""
    hits, count = reader.take("II")
    trees = {}
    for _ in range(count):
        handle, length, nodes, drawn, columns, sure = reader.take(TREE)
        if drawn >= len(DRAWN):
            raise MalformedFrame(f"a tree drawn in an unknown way {drawn}")
        tokens, parents = reader.integers(), tuple(array("b", reader.raw()))
        q_ids = _matrix(reader, np.int32, nodes, columns).long() if columns else None
        q_probs = _matrix(reader, np.float32, nodes, columns) if columns else None
        confidence = tuple(_column(reader, np.float64, nodes).tolist()) if sure else None
        trees[handle] = length, DraftTree(tokens, parents, DRAWN[drawn], q_ids, q_probs, confidence)
    return Trees(trees, reader.integers(), hits)


def _matrix(reader: Reader, dtype: type[np.generic], rows: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(_column(reader, dtype, rows * columns).reshape(rows, columns))


def _column(reader: Reader, dtype: type[np.generic], size: int) -> np.ndarray:
    data = reader.raw()
    if len(data) != size * np.dtype(dtype).itemsize:
        raise MalformedFrame("a tree with a broken column")
    return np.frombuffer(data, dtype).copy()
