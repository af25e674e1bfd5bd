"""The draft phase of a step: every drafter is told to begin before any answer is awaited."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from gammaray.engine.discreet import described
from gammaray.engine.drafters.base import (
    Caching,
    Drafter,
    DraftTree,
    DraftView,
    Failing,
    Featured,
    Observing,
    Ticket,
    Troubled,
)
from gammaray.engine.scheduler import Slice
from gammaray.types import Cause, Reuse

log = logging.getLogger(__name__)
T = TypeVar("T")
Q_TOLERANCE = 0.01  # of the sum of q, which a drafter may hold in a short format


class GuardedDrafter:
    """A drafter that cannot take a request down with it: whatever it raises costs a draft, never more."""

    def __init__(self, name: str, drafter: Drafter) -> None:
        self.inner = drafter
        self.vocab_size = drafter.vocab_size
        self.layers = drafter.layers if isinstance(drafter, Featured) else ()
        self.top = drafter.top if isinstance(drafter, Observing) else 0
        self._name = name
        self._failures = 0
        self._broke: Cause | None = None  # in this round

    def start_round(self) -> None:
        self._broke = None

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return self._guard(lambda: self.inner.begin(views), Ticket(()))

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        return self._guard(lambda: dict(self.inner.collect(ticket, deadline)), {})

    def commit(self, rid: str, tokens: Sequence[int], features: torch.Tensor | None = None) -> None:
        self._guard(lambda: self.inner.commit(rid, tokens, features), None)

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        self._guard(lambda: self.inner.catch_up(rid, tokens, salt), None)

    def release(self, rid: str) -> None:
        self._guard(lambda: self.inner.release(rid), None)

    def length(self, rid: str) -> int | None:
        return self._guard(lambda: self.inner.length(rid), None)

    def accepts(self, tree: DraftTree, depth: int, width: int, vocab_size: int) -> bool:
        """Whether it gave what was asked for; what is no tree at all is a failure."""
        return self._guard(lambda: len(tree) > 0 and well_formed(tree, depth, width, vocab_size), False)

    def trouble(self, rid: str) -> Cause | None:
        """Why `rid` has no draft in this round, if it should have one."""
        inner = self.inner
        if self._broke or not isinstance(inner, Troubled):
            return self._broke
        return self._guard(lambda: inner.trouble(rid), None)

    def observe(self, rid: str, tree: DraftTree | None, likeliest: torch.Tensor) -> None:
        inner = self.inner
        if isinstance(inner, Observing):
            self._guard(lambda: inner.observe(rid, tree, likeliest), None)

    def take_reuse(self) -> Reuse:
        inner = self.inner
        return self._guard(inner.take_reuse, Reuse()) if isinstance(inner, Caching) else Reuse()

    def take_failures(self) -> int:
        """Calls that raised since this was asked last."""
        failures, self._failures = self._failures, 0
        inner = self.inner
        return failures + (self._guard(inner.take_failures, 0) if isinstance(inner, Failing) else 0)

    def _guard(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception as error:
            self._failures += 1
            self._broke = self._broke or ("oom" if _out_of_memory(error) else "worker_lost")
            log.error(
                "drafter %r failed (%s); its requests decode plainly\n%s", self._name, *described(error)
            )
            return otherwise


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


@dataclass(slots=True)
class Drafts:
    """Of one step. What has no tree was late, lost or malformed, or there was nothing to say."""

    trees: dict[str, DraftTree] = field(default_factory=dict)  # by rid
    troubles: dict[str, Cause] = field(default_factory=dict)  # by rid, of those that should have one
    seconds: dict[str, float] = field(default_factory=dict)  # by drafter


@dataclass(frozen=True, slots=True)
class Asked:
    """Drafts under way: who was told to begin, for whom."""

    parts: Mapping[str, list[Slice]] = field(default_factory=dict)  # by drafter
    tickets: Mapping[str, Ticket] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)  # that telling them took


def begin(
    slices: Sequence[Slice], drafters: Mapping[str, GuardedDrafter], clock: Callable[[], float]
) -> Asked:
    """Tells each drafter to begin with its sequences."""
    parts: dict[str, list[Slice]] = defaultdict(list)
    for part in slices:
        parts[part.sequence.request.plan.drafter or ""].append(part)
    tickets, seconds = {}, {}
    for name, own in parts.items():
        began = clock()
        drafters[name].start_round()
        tickets[name] = drafters[name].begin([_view(drafters[name], part) for part in own])
        seconds[name] = clock() - began
    return Asked(parts, tickets, seconds)


def collect(
    asked: Asked,
    drafters: Mapping[str, GuardedDrafter],
    vocab_size: int,
    deadline: float,
    clock: Callable[[], float],
) -> Drafts:
    """What they made. What gets no tree decodes plainly this round."""
    done = Drafts(seconds=dict(asked.seconds))
    for name, ticket in asked.tickets.items():
        began = clock()
        found = drafters[name].collect(ticket, deadline)
        for part in asked.parts[name]:
            _take(done, drafters[name], part, found.get(part.sequence.rid), vocab_size)
        done.seconds[name] += clock() - began
    return done


def _take(
    done: Drafts, drafter: GuardedDrafter, part: Slice, tree: DraftTree | None, vocab_size: int
) -> None:
    rid = part.sequence.rid
    if tree is not None and drafter.accepts(tree, part.depth, part.width, vocab_size):
        done.trees[rid] = tree
    elif trouble := drafter.trouble(rid):
        done.troubles[rid] = trouble


def well_formed(tree: DraftTree, depth: int, width: int, vocab_size: int) -> bool:
    """Real tokens, parents first, within the depth and the nodes that KV was claimed for, q for each node."""
    nodes = len(tree.tokens)
    if len(tree.parents) != nodes or nodes > depth * width or not _is_confident(tree):
        return False
    levels: list[int] = []
    for index, parent in enumerate(tree.parents):
        if not -1 <= parent < index:
            return False
        levels.append(1 if parent < 0 else levels[parent] + 1)
    in_vocabulary = all(type(token) is int and 0 <= token < vocab_size for token in tree.tokens)
    return in_vocabulary and max(levels, default=0) <= depth and _has_q(tree, vocab_size)


def _is_confident(tree: DraftTree) -> bool:
    """A probability for each node, or nothing."""
    said = tree.confidence
    return said is None or (len(said) == len(tree) and all(0 <= each <= 1 for each in said))


def _has_q(tree: DraftTree, vocab_size: int) -> bool:
    """For each sampled node the distribution that it was drawn from: a wrong one would change the output."""
    if tree.drawn == "deterministic":
        return True
    ids, probs = tree.q_ids, tree.q_probs
    if ids is None or probs is None or ids.dim() != 2 or ids.shape != probs.shape or len(ids) != len(tree):
        return False
    if (
        ids.dtype != torch.int64
        or not probs.is_floating_point()
        or not bool(((ids >= 0) & (ids < vocab_size)).all())
    ):
        return False
    normal = bool((probs >= 0).all()) and bool(((probs.sum(-1) - 1).abs() < Q_TOLERANCE).all())  # NaN fails
    pads = -1 - torch.arange(ids.shape[1], device=ids.device)
    drawable = torch.where(probs > 0, ids, pads).sort(-1).values
    normal = normal and bool((drawable.diff(dim=-1) > 0).all())  # each token once
    tokens = torch.tensor(tree.tokens, device=ids.device)
    return normal and bool((ids == tokens[:, None]).any(-1).all())


def _view(drafter: GuardedDrafter, part: Slice) -> DraftView:
    sequence = part.sequence
    if not drafter.layers and drafter.length(sequence.rid) != len(sequence.tokens):
        drafter.catch_up(sequence.rid, sequence.tokens, sequence.table.salt)
    return DraftView(
        rid=sequence.rid,
        length=len(sequence.tokens),
        depth=part.depth,
        width=part.width,
        sampling=sequence.request.sampling,
        sequence=sequence.index,
        coupled=sequence.request.plan.verification == "coupled",
        blocks=sequence.table.blocks,
    )
