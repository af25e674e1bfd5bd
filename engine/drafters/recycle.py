"""Token Recycling (Luo et al., arXiv 2408.08696): what the target thought likely behind a token serves as a
draft when that token comes again.

Costs no model pass and no KV; learns from rejected nodes as well.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush

import torch

from gammaray.engine.drafters.base import DraftTree, DraftView, Ticket
from gammaray.engine.drafters.registry import Making

Successors = dict[int, Sequence[int]]  # token -> the likeliest ones behind it; only of tokens that were seen


@dataclass(slots=True)
class _Text:
    last: int  # token
    length: int
    successors: Successors


class RecycleDrafter:
    """Drafts a tree of a fixed shape: the likeliest successors of each node, as they were when last seen."""

    def __init__(self, vocab_size: int, candidates: int = 8, shared: bool = False) -> None:
        """`shared`: all sequences of a tenant learn from each other."""
        self.vocab_size: int | None = vocab_size
        self.top = candidates
        self._shared = shared
        self._texts: dict[str, _Text] = {}
        self._tenants: dict[bytes, Successors] = {}  # by salt

    def begin(self, views: Sequence[DraftView]) -> Ticket:
        return Ticket(tuple(views))

    def collect(self, ticket: Ticket, deadline: float) -> Mapping[str, DraftTree]:
        trees = {}
        for view in ticket.views:
            text = self._texts.get(view.rid)
            if text and text.length == view.length and (tree := _fill(text, view)):
                trees[view.rid] = tree
        return trees

    def observe(self, rid: str, tree: DraftTree | None, likeliest: torch.Tensor) -> None:
        """Of equal tokens the first one counts, as it is the likeliest to be right."""
        if text := self._texts.get(rid):
            seen = [text.last, *(tree.tokens if tree else ())]
            for token, row in reversed(list(zip(seen, likeliest.tolist(), strict=True))):
                text.successors[token] = array("i", row)

    def commit(self, rid: str, tokens: Sequence[int], features: torch.Tensor | None = None) -> None:
        if (text := self._texts.get(rid)) and tokens:
            text.last, text.length = tokens[-1], text.length + len(tokens)

    def catch_up(self, rid: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        if text := self._texts.get(rid):
            successors = text.successors
        else:
            successors = self._tenants.setdefault(salt, {}) if self._shared else {}
        self._texts[rid] = _Text(tokens[-1], len(tokens), successors)

    def release(self, rid: str) -> None:
        self._texts.pop(rid, None)

    def length(self, rid: str) -> int | None:
        text = self._texts.get(rid)
        return text.length if text else None


def _fill(text: _Text, view: DraftView) -> DraftTree | None:
    """The shape with tokens in it, short of what hangs on tokens of which nothing is known."""
    tokens: list[int] = []
    parents: list[int] = []
    place = {-1: -1}  # node of the shape -> node of the tree
    for node, (parent, rank) in enumerate(shape(view.depth, view.width, view.nodes)):
        if parent in place:
            above = place[parent]
            behind = text.successors.get(tokens[above] if above >= 0 else text.last, ())
            if rank < len(behind):
                place[node] = len(tokens)
                tokens.append(behind[rank])
                parents.append(above)
    return DraftTree(tuple(tokens), tuple(parents)) if tokens else None


@cache
def shape(depth: int, width: int, nodes: int) -> tuple[tuple[int, int], ...]:
    """The parent and the rank among its siblings of each node, level by level: of all trees of that many
    nodes the best one, if each rank is half as likely to be right as the one before."""
    chosen: list[tuple[int, ...]] = []  # ranks from the root
    heap: list[tuple[int, tuple[int, ...]]] = [(1, (0,))]  # halvings, path
    while heap and len(chosen) < nodes:
        halvings, path = heappop(heap)
        chosen.append(path)
        if path[-1] + 1 < width:
            heappush(heap, (halvings + 1, (*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            heappush(heap, (halvings + 1, (*path, 0)))
    chosen.sort(key=lambda path: (len(path), path))
    place = {path: node for node, path in enumerate([(), *chosen], start=-1)}
    return tuple((place[path[:-1]], path[-1]) for path in chosen)


def make(making: Making) -> RecycleDrafter:
    config = making.config
    return RecycleDrafter(making.target.vocab_size, config.candidates, config.memory == "tenant")
