"""A drafter whose model lives in a draft worker, behind a link. Speaks the drafter protocol."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from gammaray.actors.link.client import Link
from gammaray.actors.link.frames import Asked, Change, Trees, Update
from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.types import Cause


class RemoteDrafter:
    """Knows how long each sequence is at the worker. What changes is sent along with the next question.

    After a loss it knows no sequence any more: the engine then begins each of them again (`catch_up`).
    """

    def __init__(self, link: Link, vocab_size: int | None = None) -> None:
        self.link, self.vocab_size = link, vocab_size
        self.drafts = self.hits = 0
        self._answered = True  # to the last question
        self._generation = link.generation
        self._handles: dict[str, int] = {}
        self._lengths: dict[int, int] = {}
        self._updates: dict[int, Update] = {}  # not sent yet, by handle
        self._next = itertools.count()
        link.on_trees(self._learn)

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        with self.link.lock:
            asked = self._asked(views) if self.link.ready() else []
            number = self._ask(asked) if asked else None
            return Ticket(tuple(views), number)

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        with self.link.lock:
            number = ticket.payload
            found = self.link.answer(number, deadline) if isinstance(number, int) else None
            self._answered = found is not None
            if found is None:
                return {}
            trees = {}
            for view in ticket.views:
                length, tree = found.trees.get(self._handles.get(view.rid, -1), (-1, None))
                if tree is not None and length == view.length:
                    trees[view.rid] = tree
            self.drafts, self.hits = self.drafts + len(trees), self.hits + found.hits
            return trees

    def commit(self, rid: str, tokens: Sequence[int], features: torch.Tensor | None = None) -> None:
        with self.link.lock:
            if (length := self.length(rid)) is None:
                return
            handle = self._handles[rid]
            pending = self._updates.get(handle) or Update(Change.APPEND, handle, length)
            grown = Update(pending.change, handle, pending.length, (*pending.tokens, *tokens), pending.salt)
            self._updates[handle] = grown
            self._lengths[handle] = length + len(tokens)

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        with self.link.lock:
            self._notice_loss()
            if not self.link.up:
                return
            handle = self._handles.setdefault(rid, next(self._next))
            self._updates[handle] = Update(Change.BEGIN, handle, 0, tuple(tokens), salt)
            self._lengths[handle] = len(tokens)

    def release(self, rid: str) -> None:
        with self.link.lock:
            self._notice_loss()
            if (handle := self._handles.pop(rid, None)) is not None:
                self._lengths.pop(handle, None)
                self._updates[handle] = Update(Change.RELEASE, handle)

    def length(self, rid: str) -> int | None:
        with self.link.lock:
            self._notice_loss()
            return self._lengths.get(self._handles.get(rid, -1))

    def trouble(self, rid: str) -> Cause | None:
        """`timeout`: the worker is there, but late, or left alone for a while as it was late."""
        if not self.link.up:
            return "worker_lost"
        return None if self._answered else "timeout"

    def keep(self) -> None:
        """See Link.keep; also tells an idle worker what was released."""
        self.link.keep()
        with self.link.lock:
            self._notice_loss()
            if self._updates and not self._handles and self.link.ready():
                self._ask([])

    def _ask(self, asked: Sequence[Asked]) -> int | None:
        number = self.link.ask(tuple(self._updates.values()), asked)
        self._updates.clear()
        return number

    def _asked(self, views: Sequence[DraftView]) -> list[Asked]:
        return [Asked(self._handles[v.rid], v) for v in views if self.length(v.rid) == v.length]

    def _learn(self, trees: Trees) -> None:
        """What the worker does not have as we think it has must begin again."""
        for handle in trees.stale:
            self._lengths.pop(handle, None)

    def _notice_loss(self) -> None:
        if self._generation != self.link.generation:
            self._generation = self.link.generation
            for known in (self._handles, self._lengths, self._updates):
                known.clear()
