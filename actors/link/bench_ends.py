"""Ways from a replica to a draft worker, each with a drafter at its other end that answers at once.

All of them carry the frames of the draft link, and both ends do all that the product does with a frame, so
that they differ by what lies between. `device` here carries frames too, in buffers of a fixed size; with
features it also carries what only a device transport is made for.
"""

from __future__ import annotations

import logging
import multiprocessing
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gammaray.actors.features import TARGET, WORKER, FeatureLink, Shape
from gammaray.actors.link.channel import Address, Channel, connect, listen
from gammaray.actors.link.frames import Asked, Change, Kind, Trees, Update, pack_draft, pack_trees
from gammaray.actors.link.serve import serve
from gammaray.actors.link.server import DraftServer
from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.ranks import FOREVER_S, Group, Meeting, host, join
from gammaray.types import SamplingParams

TOP = 64  # entries of q that a sampled draft carries for each of its tokens
HIDDEN = 2048  # of the features: bfloat16, one layer
VOCAB, NAME, SECRET = 151_936, "instant", b"secret"
LOOPBACK = "127.0.0.1"
START_S = 60.0
LENGTH = struct.Struct("<Q")
OBJECT_STORE_BYTES = 128 * 2**20

PROCESSES = multiprocessing.get_context("forkserver")  # so that torch is imported once for all of them
PROCESSES.set_forkserver_preload([__name__])

Open = Callable[[], Channel]


@dataclass(frozen=True, slots=True)
class Payload:
    """One round: `batch` sequences whose drafts hold `tokens` tokens together, each with its top-64 q.

    Since the round before every sequence has grown by its whole draft and one more token.
    """

    tokens: int
    batch: int

    @property
    def depths(self) -> list[int]:
        """Of each sequence's draft, a chain."""
        each, more = divmod(self.tokens, self.batch)
        return [each + (i < more) for i in range(self.batch)]

    def views(self, lengths: Sequence[int]) -> list[DraftView]:
        sampling = SamplingParams(temperature=1.0, seed=1)
        rows = enumerate(zip(lengths, self.depths, strict=True))
        return [DraftView(f"r{i}", length, depth, 1, sampling, 0) for i, (length, depth) in rows]

    @property
    def question_bytes(self) -> int:
        """Of a DRAFT frame."""
        updates = [Update(Change.APPEND, i, 0, (0,) * (depth + 1)) for i, depth in enumerate(self.depths)]
        asked = [Asked(i, view) for i, view in enumerate(self.views(self.depths))]
        return len(pack_draft(0, 0, updates, asked))

    @property
    def answer_bytes(self) -> int:
        """Of a TREES frame."""
        return len(pack_trees(0, 0, Trees({i: (0, draft(depth)) for i, depth in enumerate(self.depths)})))

    @property
    def shape(self) -> Shape:
        return Shape(self.tokens, HIDDEN, self.batch, torch.bfloat16)

    @property
    def features_bytes(self) -> int:
        return self.tokens * HIDDEN * torch.bfloat16.itemsize


# The worker's end ------------------------------------------------------------------------------------


@lru_cache
def draft(depth: int) -> DraftTree:
    """A chain drawn from a q of TOP entries."""
    ids = torch.arange(TOP).repeat(depth, 1)  # [K, S]
    return DraftTree(
        tuple(range(depth)), tuple(range(-1, depth - 1)), "iid", ids, torch.full(ids.shape, 1 / TOP)
    )


class Instant:
    """A drafter that answers at once."""

    vocab_size: int | None = VOCAB

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views))

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        return {view.rid: draft(view.depth) for view in ticket.views}

    def commit(self, rid: str, tokens: Sequence[int], features: torch.Tensor | None = None) -> None:
        self._lengths[rid] += len(tokens)

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        self._lengths[rid] = len(tokens)

    def release(self, rid: str) -> None:
        self._lengths.pop(rid, None)

    def length(self, rid: str) -> int | None:
        return self._lengths.get(rid)


class Answerer:
    """One client's worker: a frame in, a frame out."""

    def __init__(self) -> None:
        self._server = draft_server()

    def answer(self, frame: bytes) -> bytes:
        return self._server.handle([(0, frame)])[0][1]


def draft_server() -> DraftServer:
    return DraftServer(Instant(), VOCAB, NAME, SECRET)


def on_socket(place: str | tuple[str, int], told: Any) -> None:
    """A worker process. Tells where it listens; ends when its parent does."""
    parent = multiprocessing.parent_process()  # not the fork server, which lives as long as its children
    assert parent is not None
    listener = listen(place)
    told.send(listener.getsockname())
    serve(listener, draft_server(), lambda: not parent.is_alive(), time.perf_counter)


def on_device(meeting: Meeting, payload: Payload, features: bool) -> None:
    """A worker process. Ends when the target does."""
    torch.set_num_threads(1)
    seat, answerer = join(meeting, WORKER), Answerer()
    frames = Packed(seat.group("frames"), TARGET, payload.answer_bytes, payload.question_bytes)
    link = FeatureLink(seat, payload.shape) if features else None
    with suppress(ConnectionError):
        while True:
            frame = frames.receive()
            if link and frame[0] == Kind.DRAFT:
                link.receive()
            frames.send(answerer.answer(frame))


# The replica's end -----------------------------------------------------------------------------------


class Calls:
    """A channel over calls that return the answer."""

    def __init__(self, call: Callable[[bytes], bytes]) -> None:
        self._call, self._answers = call, deque[bytes]()

    def send(self, frame: bytes) -> None:
        self._answers.append(self._call(frame))

    def receive(self, until: float) -> bytes | None:
        return self._answers.popleft() if self._answers else None

    def close(self) -> None:
        self._answers.clear()


class Packed:
    """Frames over a group, each with its length in one buffer of a fixed size: one message a frame."""

    def __init__(self, group: Group, peer: int, most_out: int, most_in: int) -> None:
        group.set_patience(FOREVER_S)
        self._group, self._peer = group, peer
        self._out = torch.zeros(LENGTH.size + most_out, dtype=torch.uint8)
        self._in = torch.zeros(LENGTH.size + most_in, dtype=torch.uint8)

    def send(self, frame: bytes) -> None:
        packed = np.frombuffer(LENGTH.pack(len(frame)) + frame, np.uint8)
        self._out.numpy()[: len(packed)] = packed
        self._group.send(self._out, self._peer)

    def receive(self) -> bytes:
        packed = self._group.receive(self._in, self._peer).numpy().tobytes()
        return packed[LENGTH.size : LENGTH.size + LENGTH.unpack_from(packed)[0]]


@contextmanager
def in_process(payload: Payload) -> Iterator[Open]:
    yield partial(Calls, Answerer().answer)


@contextmanager
def socket(payload: Payload, tcp: bool = False) -> Iterator[Open]:
    ours, theirs = PROCESSES.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        place = (LOOPBACK, 0) if tcp else str(Path(folder, "draft"))
        with _process(on_socket, place, theirs):
            if not ours.poll(START_S):
                raise ConnectionError(f"no draft worker listens after {START_S:.0f} s")
            address = Address(ours.recv(), SECRET)
            yield lambda: connect(address, START_S)


@contextmanager
def device(payload: Payload, features: bool = False) -> Iterator[Open]:
    seat = host(2)
    with _process(on_device, seat.meeting, payload, features):
        frames = Packed(seat.group("frames"), WORKER, payload.question_bytes, payload.answer_bytes)
        link = FeatureLink(seat, payload.shape) if features else None
        states = torch.zeros(payload.tokens, HIDDEN, dtype=torch.bfloat16)

        def call(frame: bytes) -> bytes:
            frames.send(frame)
            if link and frame[0] == Kind.DRAFT:
                link.send(states, payload.depths)
            return frames.receive()

        yield partial(Calls, call)


@contextmanager
def ray_actor(payload: Payload) -> Iterator[Open]:
    """On a Ray of our own. Its variables must be set before this (cluster/local.py)."""
    import ray

    ray.init(
        "local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        actor: Any = ray.remote(num_cpus=0)(Answerer).remote()
        ray.get(actor.__ray_ready__.remote())
        yield partial(Calls, lambda frame: ray.get(actor.answer.remote(frame)))
    finally:
        ray.shutdown()


WAYS: dict[str, Callable[[Payload], AbstractContextManager[Open]]] = {
    "in process": in_process,
    "socket, Unix": socket,
    "socket, TCP": partial(socket, tcp=True),
    "device, gloo": device,
    "device, gloo, with features": partial(device, features=True),
    "Ray actor call": ray_actor,
}


@contextmanager
def _process(work: Callable[..., None], *args: object) -> Iterator[BaseProcess]:
    process = PROCESSES.Process(target=work, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
