"""Which outcomes of a verification are worth a draft in advance (math.md section 3b; arXiv 2603.03251).

An outcome is a node of the draft where the target stops, and the token that it emits there. Probabilities
are those of lately: how often, at each depth, the child of each rank was accepted, and how often the token
was the drafter's first, second, ... guess, at the end of a path or where a child was rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest

RANKS = 8  # of children, and of guesses
DEPTHS = 16  # deeper ones count as the last
MEMORY = 0.98  # share of a count that stays when the next comes: about the last 50
PRIOR_WEIGHT = 4.0  # outcomes that the prior counts for
ACCEPTED = (0.6, 0.1, 0.05, 0.03, 0.02, 0.01, 0.01, 0.01)  # priors by rank
AFTER_PATH = (0.6, 0.12, 0.06, 0.04, 0.03, 0.02, 0.01, 0.01)
AFTER_REJECTION = (0.3, 0.15, 0.1, 0.06, 0.05, 0.04, 0.03, 0.02)


class Shares:
    """How often each of RANKS happened, of all times that one of them could; old times fade."""

    def __init__(self, prior: Sequence[float], memory: float = MEMORY) -> None:
        self._counts = [PRIOR_WEIGHT * share for share in prior]
        self._total = PRIOR_WEIGHT
        self._memory = memory

    def observe(self, rank: int | None) -> None:
        """None: none of them."""
        self._counts = [self._memory * count for count in self._counts]
        self._total = self._memory * self._total + 1
        if rank is not None and rank < RANKS:
            self._counts[rank] += 1

    def __iter__(self) -> Iterator[float]:
        return (self[rank] for rank in range(RANKS))

    def __getitem__(self, rank: int) -> float:
        return self._counts[rank] / self._total if rank < RANKS else 0.0


@dataclass(slots=True)
class Outcomes:
    """What was learned of one drafter's drafts. A tree is given by the parents of its nodes."""

    accepted: list[Shares] = field(default_factory=lambda: [Shares(ACCEPTED) for _ in range(DEPTHS)])
    after_path: Shares = field(default_factory=lambda: Shares(AFTER_PATH))
    after_rejection: Shares = field(default_factory=lambda: Shares(AFTER_REJECTION))

    def learn(
        self, parents: Sequence[int], path: Sequence[int], token: int, guesses: Mapping[int, Sequence[int]]
    ) -> None:
        """A draft ended at the last node of `path` with `token`."""
        children = _children(parents)
        for depth, (at, node) in enumerate(zip((-1, *path), path, strict=False)):
            self._at(depth).observe(children[at].index(node))
        end = path[-1] if path else -1
        if children[end]:
            self._at(len(path)).observe(None)
        if end in guesses:
            ranked = list(guesses[end])
            rank = ranked.index(token) if token in ranked else None
            self._guessed(bool(children[end])).observe(rank)

    def stops(self, parents: Sequence[int]) -> dict[int, float]:
        """Probability that verification ends at each node; -1: at the root."""
        reached, ends, depths = {-1: 1.0}, {}, {-1: 0}
        for node, children in _children(parents).items():
            shares = [self._at(depths[node])[rank] for rank in range(len(children))]
            for child, share in zip(children, shares, strict=True):
                reached[child], depths[child] = reached[node] * share, depths[node] + 1
            ends[node] = reached[node] * max(0.0, 1.0 - sum(shares))
        return ends

    def choose(self, parents: Sequence[int], budget: int) -> list[tuple[int, int]]:
        """The `budget` likeliest outcomes as (node, rank of the guess), the likeliest first."""
        inner = set(parents)
        weighed = [
            (share * self._guessed(node in inner)[rank], -rank, -node)
            for node, share in self.stops(parents).items()
            for rank in range(RANKS)
        ]
        return [(-node, -rank) for share, rank, node in nlargest(budget, weighed) if share > 0]

    def _at(self, depth: int) -> Shares:
        return self.accepted[min(depth, DEPTHS - 1)]

    def _guessed(self, inner: bool) -> Shares:
        return self.after_rejection if inner else self.after_path


def _children(parents: Sequence[int]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {node: [] for node in range(-1, len(parents))}
    for node, parent in enumerate(parents):
        children[parent].append(node)
    return children


def share_budget(rows: int, sequences: int, draft_nodes: int, next_nodes: int, most_nodes: int) -> int:
    """Outcomes that each of `sequences` may have.

    `rows`: that one pass of the draft model feeds at little more cost than one. A tree holds `most_nodes`,
    its draft `draft_nodes` of them; each outcome takes its token and `next_nodes`.
    """
    return max(0, min(rows // max(1, sequences), (most_nodes - draft_nodes) // (1 + next_nodes)))
