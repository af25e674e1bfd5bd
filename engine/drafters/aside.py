"""A model drafter in the target's process that works while the target verifies (`target.asynchronous`).

It has a thread, as its every level waits for what the device drew, and on that thread a CUDA stream, beside
the one that the target uses. Nothing but tokens goes in; drafts come out, with q where they are sampled. On
a CPU there is nothing to gain: both would compute on the same cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from gammaray.engine.drafters.base import Caching, Drafter, DraftTree, DraftView, Ticket
from gammaray.types import Reuse

T = TypeVar("T")


class Side(Protocol):
    """Where the drafter works. `here` and `there` are the streams of the target and of the drafter."""

    def depart(self) -> object:
        """Here: the moment from which on there may work begin."""

    def work(self, moment: object, call: Callable[[], T]) -> tuple[T, object]:
        """There: the result of the call, and the moment at which it is whole."""

    def arrive(self, moment: object, results: Sequence[Tensor]) -> None:
        """Here: what comes next finds the results."""


class CudaSide:
    """A stream. Never ran: there was no GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def depart(self) -> object:
        return torch.cuda.current_stream(self._device).record_event()

    def work(self, moment: object, call: Callable[[], T]) -> tuple[T, object]:
        assert isinstance(moment, torch.cuda.Event)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(moment)
            return call(), self._stream.record_event()

    def arrive(self, moment: object, results: Sequence[Tensor]) -> None:
        assert isinstance(moment, torch.cuda.Event)
        here = torch.cuda.current_stream(self._device)
        here.wait_event(moment)
        for each in results:
            each.record_stream(here)  # its memory is not used again before this stream is done with it


class AsideDrafter:
    """Drafts from `begin` on. Every other call waits until what was begun is done, and is made there too."""

    def __init__(self, inner: Drafter, side: Side) -> None:
        self.vocab_size = inner.vocab_size
        self._inner, self._side = inner, side
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drafter")

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views), self._start(lambda: self._draft(views)))

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        """Whatever the deadline, as every drafter of the engine's own process."""
        assert isinstance(ticket.payload, Future)
        trees: Mapping[str, DraftTree] = self._wait(ticket.payload)
        return trees

    def commit(self, rid: str, tokens: Sequence[int], features: Tensor | None = None) -> None:
        self._wait(self._start(lambda: self._inner.commit(rid, tokens)))

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        self._wait(self._start(lambda: self._inner.catch_up(rid, tokens, salt)))

    def release(self, rid: str) -> None:
        self._wait(self._start(lambda: self._inner.release(rid)))

    def length(self, rid: str) -> int | None:
        return self._wait(self._start(lambda: self._inner.length(rid)))

    def take_reuse(self) -> Reuse:
        inner = self._inner
        return self._wait(self._start(inner.take_reuse)) if isinstance(inner, Caching) else Reuse()

    def _draft(self, views: Sequence[DraftView]) -> Mapping[str, DraftTree]:
        return self._inner.collect(self._inner.begin(views), 0.0)

    def _start(self, call: Callable[[], T]) -> Future[tuple[T, object]]:
        return self._thread.submit(self._side.work, self._side.depart(), call)

    def _wait(self, started: Future[tuple[T, object]]) -> T:
        result, moment = started.result()
        drawn = result.values() if isinstance(result, Mapping) else ()
        self._side.arrive(moment, [q for tree in drawn for q in (tree.q_ids, tree.q_probs) if q is not None])
        return result
