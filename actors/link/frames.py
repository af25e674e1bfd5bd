"""What goes over a draft link: length-prefixed binary frames, little-endian, no pickle.

    client -> worker   HELLO, DRAFT (changes of sequences, then views), PING
    worker -> client   WELCOME or REFUSED, TREES, PONG

Every frame begins with its kind, the generation of the link and a number that the answer repeats, so that
late answers and those of an earlier link are told apart. A sequence is a handle, an integer of the client's.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from typing import Any

import torch

from gammaray.engine.drafters.base import DraftTree, DraftView, Drawn
from gammaray.types import SamplingParams

PROTOCOL = 1
HEAD = struct.Struct("<BIQ")  # kind, generation, number
SIZE = struct.Struct("<I")  # of a column, in bytes
LARGEST = 2**32 - 1
DRAWN: tuple[Drawn, ...] = ("deterministic", "iid", "without_replacement")


class MalformedFrame(Exception):
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


KINDS, CHANGES = frozenset(Kind), frozenset(Change)


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
    """Grows a frame. What repeats is written column by column: packing value by value takes milliseconds."""

    def __init__(self, kind: Kind, generation: int, number: int) -> None:
        self._parts = [HEAD.pack(kind, generation, number)]

    def raw(self, data: bytes) -> None:
        self._parts += [SIZE.pack(len(data)), data]

    def column(self, code: str, values: Iterable[float]) -> None:
        """`code`: of the array module."""
        self.raw(array(code, values).tobytes())

    def done(self) -> bytes:
        return b"".join(self._parts)


class Reader:
    """Reads a frame. Raises MalformedFrame where it ends too early, or columns do not fit each other."""

    def __init__(self, frame: bytes) -> None:
        self._frame, self._at = frame, 0
        kind, self.generation, self.number = HEAD.unpack(self._bytes(HEAD.size))
        if kind not in KINDS:
            raise MalformedFrame(f"a frame of unknown kind {kind}")
        self.kind = Kind(kind)

    def raw(self) -> bytes:
        (size,) = SIZE.unpack(self._bytes(SIZE.size))
        return self._bytes(size)

    def column(self, code: str, count: int | None = None) -> array[Any]:
        """`count`: how many there must be."""
        values: array[Any] = array(code)
        data = self.raw()
        if len(data) % values.itemsize or (count is not None and len(data) != count * values.itemsize):
            raise MalformedFrame("a frame with a broken column")
        values.frombytes(data)
        return values

    def tensor(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """[count]."""
        data = self.raw()
        if len(data) != count * dtype.itemsize:
            raise MalformedFrame("a frame with a broken tensor")
        return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)

    def _bytes(self, size: int) -> bytes:
        if self._at + size > len(self._frame):
            raise MalformedFrame("a frame ends too early")
        self._at += size
        return self._frame[self._at - size : self._at]


def pack_hello(hello: Hello, generation: int) -> bytes:
    writer = Writer(Kind.HELLO, generation, 0)
    writer.column("I", (hello.protocol, hello.vocab_size))
    writer.raw(hello.secret)
    writer.raw(hello.drafter.encode())
    return writer.done()


def read_hello(reader: Reader) -> Hello:
    protocol, vocab_size = reader.column("I", 2)
    return Hello(reader.raw(), vocab_size, reader.raw().decode("utf-8", "replace"), protocol)


def pack_text(kind: Kind, generation: int, number: int, text: str = "") -> bytes:
    """WELCOME, REFUSED with its reason, PING, PONG."""
    writer = Writer(kind, generation, number)
    writer.raw(text.encode())
    return writer.done()


def pack_draft(generation: int, number: int, updates: Sequence[Update], asked: Sequence[Asked]) -> bytes:
    writer = Writer(Kind.DRAFT, generation, number)
    writer.column(
        "I", [x for u in updates for x in (u.change, u.handle, u.length, len(u.salt), len(u.tokens))]
    )
    writer.raw(b"".join(update.salt for update in updates))
    writer.column("I", chain.from_iterable(update.tokens for update in updates))
    views = [one.view for one in asked]
    writer.column("I", [x for one in asked for x in (one.handle, one.view.length, one.view.sequence)])
    writer.column("B", [x for view in views for x in (view.depth, view.width, view.coupled)])
    laws = [view.sampling for view in views]  # what a drafter's own distribution depends on
    writer.column("d", [x for law in laws for x in (law.temperature, law.top_p, law.min_p)])
    writer.column("I", [min(law.top_k, LARGEST) for law in laws])
    writer.column("Q", [law.seed & (1 << 64) - 1 for law in laws])
    return writer.done()


def read_draft(reader: Reader) -> tuple[list[Update], list[Asked]]:
    """Raises MalformedFrame."""
    updates = _updates(reader)
    heads = list(_rows(reader.column("I"), 3))
    shapes = _rows(reader.column("B", 3 * len(heads)), 3)
    laws = _rows(reader.column("d", 3 * len(heads)), 3)
    top_ks, seeds = reader.column("I", len(heads)), reader.column("Q", len(heads))
    asked = []
    for head, shape, law, top_k, seed in zip(heads, shapes, laws, top_ks, seeds, strict=True):
        (handle, length, sequence), (depth, width, coupled) = head, shape
        sampling = SamplingParams(law[0], top_k, law[1], law[2], seed=seed)
        asked.append(Asked(handle, DraftView("", length, depth, width, sampling, sequence, bool(coupled))))
    return updates, asked


def _updates(reader: Reader) -> list[Update]:
    heads, salts = list(_rows(reader.column("I"), 5)), reader.raw()
    tokens = reader.column("I", sum(head[4] for head in heads)).tolist()
    if len(salts) != sum(head[3] for head in heads):
        raise MalformedFrame("a frame with a broken column")
    updates, salt_at, token_at = [], 0, 0
    for change, handle, length, salt_size, count in heads:
        if change not in CHANGES:
            raise MalformedFrame(f"a change of unknown kind {change}")
        own = tuple(tokens[token_at : token_at + count])
        salt = salts[salt_at : salt_at + salt_size]
        updates.append(Update(Change(change), handle, length, own, salt))
        salt_at, token_at = salt_at + salt_size, token_at + count
    return updates


def _rows(values: array[Any], width: int) -> Iterator[tuple[Any, ...]]:
    if len(values) % width:
        raise MalformedFrame("a frame with a broken column")
    return zip(*[iter(values.tolist())] * width, strict=True)


def pack_trees(generation: int, number: int, found: Trees) -> bytes:
    writer = Writer(Kind.TREES, generation, number)
    trees = [tree for _, tree in found.trees.values()]
    sampled = [tree for tree in trees if tree.q_ids is not None and tree.q_probs is not None]
    writer.column("I", (found.hits, *found.stale))
    writer.column("I", [x for handle, (length, _) in found.trees.items() for x in (handle, length)])
    writer.column("B", [x for tree in trees for x in _shape(tree)])
    writer.column("I", chain.from_iterable(tree.tokens for tree in trees))
    writer.column("b", chain.from_iterable(tree.parents for tree in trees))
    writer.raw(_flat([tree.q_ids for tree in sampled], torch.int32))
    writer.raw(_flat([tree.q_probs for tree in sampled], torch.float32))
    writer.column("d", chain.from_iterable(tree.confidence or () for tree in trees))
    return writer.done()


def _shape(tree: DraftTree) -> tuple[int, int, int, bool]:
    columns = 0 if tree.q_ids is None else tree.q_ids.shape[1]
    return len(tree), DRAWN.index(tree.drawn), columns, tree.confidence is not None


def _flat(parts: Sequence[torch.Tensor | None], dtype: torch.dtype) -> bytes:
    flat = [part.flatten() for part in parts if part is not None]
    return torch.cat(flat).to("cpu", dtype).numpy().tobytes() if flat else b""


def read_trees(reader: Reader) -> Trees:
    """Raises MalformedFrame. Whether the trees are such is the engine's to check."""
    counts = reader.column("I")
    if not counts:
        raise MalformedFrame("a frame with a broken column")
    hits, *stale = counts
    heads = list(_rows(reader.column("I"), 2))
    shapes = list(_rows(reader.column("B", 4 * len(heads)), 4))
    nodes = sum(shape[0] for shape in shapes)
    entries = sum(shape[0] * shape[2] for shape in shapes)
    tokens, parents = reader.column("I", nodes).tolist(), reader.column("b", nodes).tolist()
    q_ids, q_probs = reader.tensor(torch.int32, entries).long(), reader.tensor(torch.float32, entries)
    confidence = reader.column("d", sum(shape[0] for shape in shapes if shape[3])).tolist()
    trees, at, q_at, sure_at = {}, 0, 0, 0
    for (handle, length), (count, drawn, columns, sure) in zip(heads, shapes, strict=True):
        if drawn >= len(DRAWN):
            raise MalformedFrame(f"a tree drawn in an unknown way {drawn}")
        q = slice(q_at, q_at + count * columns)
        trees[handle] = (
            length,
            DraftTree(
                tuple(tokens[at : at + count]),
                tuple(parents[at : at + count]),
                DRAWN[drawn],
                q_ids[q].view(count, columns) if columns else None,  # [K, S]
                q_probs[q].view(count, columns) if columns else None,  # [K, S]
                tuple(confidence[sure_at : sure_at + count]) if sure else None,
            ),
        )
        at, q_at, sure_at = at + count, q.stop, sure_at + (count if sure else 0)
    return Trees(trees, tuple(stale), hits)
