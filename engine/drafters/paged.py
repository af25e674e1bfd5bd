"""What drafters with KV of their own have in common: a state and a block table for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from gammaray.engine.drafters.base import DraftView, Ticket
from gammaray.engine.kv import BlockTable, KVCache
from gammaray.types import Reuse


class PagedState(Protocol):
    """One sequence: its tokens as far as they are known, and the blocks of its KV."""

    tokens: list[int]
    table: BlockTable


S = TypeVar("S", bound=PagedState)


class Paged(Generic[S]):
    """A part of the drafter protocol. `_states` are by rid."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._states: dict[str, S] = {}

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views))

    def release(self, rid: str) -> None:
        if state := self._states.pop(rid, None):
            self.cache.free(state.table)

    def length(self, rid: str) -> int | None:
        state = self._states.get(rid)
        return len(state.tokens) if state else None

    def take_reuse(self) -> Reuse:
        """Of its prefix cache, since this was asked last."""
        return self.cache.take_reuse()
