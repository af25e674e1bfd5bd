"""A drafter made of others, each sequence with one of them; and the one where that goes by tenant."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from gammaray.engine.drafters.base import Caching, Drafter, DraftTree, DraftView, Ticket, Troubled
from gammaray.types import Cause, Reuse


class Switch(ABC):
    """`chosen` keeps, by rid, who drafts for which sequence."""

    def __init__(self, vocab_size: int | None) -> None:
        self.vocab_size = vocab_size
        self.chosen: dict[str, Drafter] = {}

    @abstractmethod
    def choose(self, rid: str, salt: bytes) -> Drafter | None:
        """Who drafts for a sequence that begins again; may be who did before. None: nobody can."""

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        """Every drafter is asked before any answer is awaited."""
        groups: dict[int, tuple[Drafter, list[DraftView]]] = {}
        for view in views:
            if drafter := self.chosen.get(view.rid):
                groups.setdefault(id(drafter), (drafter, []))[1].append(view)
        return Ticket(tuple(views), [(drafter, drafter.begin(part)) for drafter, part in groups.values()])

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        parts: list[tuple[Drafter, Ticket]] = ticket.payload  # type: ignore[assignment]
        found = (drafter.collect(part, deadline) for drafter, part in parts)
        return {rid: tree for trees in found for rid, tree in trees.items()}

    def commit(self, rid: str, tokens: Sequence[int], features: torch.Tensor | None = None) -> None:
        if drafter := self.chosen.get(rid):
            drafter.commit(rid, tokens, features)

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        drafter = self.choose(rid, salt)
        if drafter is not self.chosen.get(rid):
            self.release(rid)
        if drafter is not None:
            self.chosen[rid] = drafter
            drafter.catch_up(rid, tokens, salt)

    def release(self, rid: str) -> None:
        if drafter := self.chosen.pop(rid, None):
            drafter.release(rid)

    def length(self, rid: str) -> int | None:
        drafter = self.chosen.get(rid)
        return drafter.length(rid) if drafter else None

    def trouble(self, rid: str) -> Cause | None:
        drafter = self.chosen.get(rid)
        if drafter is None:
            return "worker_lost"
        return drafter.trouble(rid) if isinstance(drafter, Troubled) else None


class TenantDrafter(Switch):
    """One drafter by name, of which tenants have their own. The salt of a sequence is its tenant's name."""

    def __init__(
        self, drafters: Mapping[str, Drafter], vocab_size: int | None, others: Drafter | None = None
    ) -> None:
        """`others`: of every tenant that has none of its own."""
        super().__init__(vocab_size)
        self._drafters, self._others = dict(drafters), others

    def choose(self, rid: str, salt: bytes) -> Drafter | None:
        return self._drafters.get(salt.decode(), self._others)

    def take_reuse(self) -> Reuse:
        """Of those that have a prefix cache in this process."""
        total = Reuse()
        for one in (*self._drafters.values(), self._others):
            if isinstance(one, Caching):
                total += one.take_reuse()
        return total
