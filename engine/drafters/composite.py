"""Several drafters for one sequence: their trees, merged under one node budget.

A part that fails, or has nothing to say, leaves the draft to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from gammaray.engine.drafters.base import Drafter, DraftTree, DraftView, Ticket
from gammaray.engine.drafters.registry import Making
from gammaray.engine.drafting import GuardedDrafter
from gammaray.engine.hidden import of_layers
from gammaray.types import Cause, Reuse


@dataclass(slots=True)
class _Text:
    """A sequence as far as its tokens are known, which parts that need the target's states may not be."""

    tokens: list[int]
    salt: bytes


class CompositeDrafter:
    """Its parts keep states of their own, each at its own length.

    Those that need the target's hidden states say how far this one is, as only the target can take them on;
    the others are brought up to date whenever they are to draft.
    """

    def __init__(self, parts: Mapping[str, Drafter], vocab_size: int) -> None:
        """`parts`: by name, the first comes first."""
        self.vocab_size: int | None = vocab_size
        self._size = vocab_size
        self._parts = [GuardedDrafter(name, part) for name, part in parts.items()]
        self.layers = tuple(sorted({layer for part in self._parts for layer in part.layers}))
        self.top = max(part.top for part in self._parts)
        self._texts: dict[str, _Text] = {}

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        tickets = []
        for part in self._parts:
            part.start_round()
            for view in views:
                self._keep_up(part, view.rid)
            tickets.append(part.begin([self._share(view) for view in views]))
        return Ticket(tuple(views), tickets)

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        tickets = cast(list[Ticket], ticket.payload)
        found = [part.collect(own, deadline) for part, own in zip(self._parts, tickets, strict=True)]
        trees = {}
        for view in ticket.views:
            drafts = [
                tree
                for part, by_rid in zip(self._parts, found, strict=True)
                if (tree := by_rid.get(view.rid)) is not None and self._accepts(part, tree, self._share(view))
            ]
            if drafts:
                trees[view.rid] = merge(drafts, view.nodes)
        return trees

    def observe(self, rid: str, tree: DraftTree | None, likeliest: Tensor) -> None:
        """`likeliest` [1 + K, top]: each part gets as many columns as it wants."""
        if text := self._texts.get(rid):
            for part in self._parts:
                if part.top and part.length(rid) == len(text.tokens):
                    part.observe(rid, tree, likeliest[:, : part.top])

    def commit(self, rid: str, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Each part gets of them what lies behind its own length."""
        if (text := self._texts.get(rid)) is None:
            return
        first = self.length(rid) or 0
        end = first + len(tokens)
        text.tokens[first:end] = tokens
        for part in self._parts:
            known = part.length(rid)
            if known is None or not first <= known < end:
                continue
            part.commit(rid, tokens[known - first :], self._states(part, features, known - first))
            if part.layers and part.length(rid) != end:
                part.release(rid)  # it has lost states, and must not hold the others back

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        self._texts[rid] = _Text(list(tokens), salt)
        for part in self._parts:
            if part.layers:
                part.catch_up(rid, tokens, salt)

    def release(self, rid: str) -> None:
        self._texts.pop(rid, None)
        for part in self._parts:
            part.release(rid)

    def length(self, rid: str) -> int | None:
        if (text := self._texts.get(rid)) is None:
            return None
        lengths = [part.length(rid) for part in self._parts if part.layers]
        return min((length for length in lengths if length is not None), default=len(text.tokens))

    def trouble(self, rid: str) -> Cause | None:
        return next((cause for part in self._parts if (cause := part.trouble(rid))), None)

    def take_reuse(self) -> Reuse:
        return sum((part.take_reuse() for part in self._parts), Reuse())

    def take_failures(self) -> int:
        return sum(part.take_failures() for part in self._parts)

    def _keep_up(self, part: GuardedDrafter, rid: str) -> None:
        text = self._texts.get(rid)
        if text and not part.layers and part.length(rid) != len(text.tokens):
            part.catch_up(rid, text.tokens, text.salt)

    def _share(self, view: DraftView) -> DraftView:
        """What one part is asked for: together they may give more than fits, never less."""
        return replace(view, width=-(-view.width // len(self._parts)))

    def _accepts(self, part: GuardedDrafter, tree: DraftTree, view: DraftView) -> bool:
        sound = part.accepts(tree, view.depth, view.width, self._size)
        return sound and tree.drawn == "deterministic"  # others cannot be merged

    def _states(self, part: GuardedDrafter, features: Tensor | None, first: int) -> Tensor | None:
        """Of `features` [n, len(layers) * H] those from row `first` on, of its own layers."""
        if features is None or not part.layers:
            return None
        return of_layers(features[first:], self.layers, part.layers)


def merge(trees: Sequence[DraftTree], nodes: int) -> DraftTree:
    """The union of deterministic trees, equal prefixes as one node with the larger confidence.

    Where all tell their confidence, the `nodes` likeliest to be accepted stay, and earlier trees decide ties;
    else those that come first.
    """
    found: dict[tuple[int, ...], float] = {}  # confidence by path; parents come first
    for tree in trees:
        for path, confidence in zip(tree.paths, tree.confidence or (0.0,) * len(tree), strict=True):
            found[path] = min(1.0, max(found.get(path, 0.0), confidence))  # NaN becomes 0
    order = list(found)
    told = all(tree.confidence is not None for tree in trees)
    if told:
        chance: dict[tuple[int, ...], float] = {(): 1.0}
        for path, confidence in found.items():
            chance[path] = chance[path[:-1]] * confidence
        order.sort(key=lambda path: -chance[path])  # stable, so a parent still comes first
    chosen = order[:nodes]
    place = {path: node for node, path in enumerate([(), *chosen], start=-1)}
    return DraftTree(
        tokens=tuple(path[-1] for path in chosen),
        parents=tuple(place[path[:-1]] for path in chosen),
        confidence=tuple(found[path] for path in chosen) if told else None,
        whole=any(tree.whole for tree in trees),
    )


def make(making: Making) -> CompositeDrafter:
    """Raises what making its parts raises."""
    assert making.others is not None
    parts = {name: making.others(name) for name in making.config.drafters}
    return CompositeDrafter(parts, making.target.vocab_size)
