"""What a drafter's word is worth: how often the target agreed, lately, where it was this confident.

Learned from the children of nodes that verification visited, which are the tested ones. What stood deeper
tells nothing, and must not: the tokens there were drawn with noise that the next round draws with again, so
a decision that looks at them would look at the next draft (math.md section 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gammaray.engine.drafters.base import DraftTree
from gammaray.engine.drafters.outcomes import ACCEPTED, DEPTHS, Shares
from gammaray.engine.verifier import Verdict

Floats = NDArray[np.float64]

BINS = 16
MEMORY = 0.995  # share of a bin's count that stays when the next comes: about the last 200
PRIOR_WEIGHT = 4.0  # tests that the prior counts for
CENTRES: Floats = (np.arange(BINS) + 0.5) / BINS
REQUEST_MEMORY = 0.95  # of one sequence: about the last 20 tested levels


class Calibration:
    """Of one drafter: confidence -> acceptance, as a rising curve. At first it is taken at its word."""

    def __init__(self) -> None:
        self._tested = [PRIOR_WEIGHT] * BINS
        self._accepted = (PRIOR_WEIGHT * CENTRES).tolist()
        self._curve: Floats | None = None

    def observe(self, confidence: float, accepted: bool) -> None:
        """Of a tested node."""
        at = min(int(confidence * BINS), BINS - 1)
        self._tested[at] = MEMORY * self._tested[at] + 1
        self._accepted[at] = MEMORY * self._accepted[at] + accepted
        self._curve = None

    def __call__(self, confidence: Sequence[float]) -> list[float]:
        if self._curve is None:
            shares = [part / whole for part, whole in zip(self._accepted, self._tested, strict=True)]
            self._curve = np.array(monotone(shares, self._tested))
        found: list[float] = np.interp(confidence, CENTRES, self._curve).tolist()
        return found


def monotone(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The rising sequence nearest to `values` in weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, and how many values it stands for
    for value, weight in zip(values, weights, strict=True):
        pool = value, weight, 1
        while pools and pools[-1][0] > pool[0]:
            mean, heavy, count = pools.pop()
            total = heavy + pool[1]
            pool = (heavy * mean + pool[1] * pool[0]) / total, total, count + pool[2]
        pools.append(pool)
    return [mean for mean, _, count in pools for _ in range(count)]


@dataclass(slots=True)
class Rates:
    """How often the children of each rank were accepted in one sequence, whatever their depth."""

    tested: float = 0.0
    accepted: dict[int, float] = field(default_factory=dict)  # by rank

    def observe(self, rank: int | None) -> None:
        """Of a tested level; None: no child was right."""
        self.tested = REQUEST_MEMORY * self.tested + 1
        self.accepted = {own: REQUEST_MEMORY * count for own, count in self.accepted.items()}
        if rank is not None:
            self.accepted[rank] = self.accepted.get(rank, 0.0) + 1


@dataclass(slots=True)
class Knowledge:
    """What is known of one drafter."""

    curve: Calibration = field(default_factory=Calibration)
    levels: list[Shares] = field(default_factory=lambda: [Shares(ACCEPTED) for _ in range(DEPTHS)])

    def expected(self, rates: Rates, tree: DraftTree) -> list[float]:
        """Acceptance of each node by its depth and rank alone, of a sequence with these rates."""
        return [self._expected(rates, depth, rank) for depth, rank in places(tree.parents)]

    def confidence(self, rates: Rates, tree: DraftTree) -> Sequence[float]:
        """What the drafter says, else what is expected."""
        return self.expected(rates, tree) if tree.confidence is None else tree.confidence

    def learn(self, rates: Rates, tree: DraftTree, verdict: Verdict) -> None:
        """From the nodes that were visited, and were not leaves."""
        visited = dict.fromkeys((-1, *verdict.path)[: verdict.tested])
        tested = [node for node, parent in enumerate(tree.parents) if parent in visited]
        right, said = set(verdict.path), self.confidence(rates, tree)
        for node in tested:
            self.curve.observe(said[node], node in right)
        for depth in range(verdict.tested):
            rank = verdict.ranks[depth] if depth < len(verdict.ranks) else None
            self.levels[min(depth, DEPTHS - 1)].observe(rank)
            rates.observe(rank)

    def _expected(self, rates: Rates, depth: int, rank: int) -> float:
        prior = PRIOR_WEIGHT * self.levels[min(depth, DEPTHS - 1)][rank]
        return (rates.accepted.get(rank, 0.0) + prior) / (rates.tested + PRIOR_WEIGHT)


def places(parents: Sequence[int]) -> list[tuple[int, int]]:
    """Depth, 0 below the root, and rank among its siblings, of each node."""
    found: list[tuple[int, int]] = []
    ranks: dict[int, int] = {}
    for parent in parents:
        rank = ranks[parent] = ranks.get(parent, -1) + 1
        found.append((found[parent][0] + 1 if parent >= 0 else 0, rank))
    return found


def survival(parents: Sequence[int], acceptance: Sequence[float]) -> list[float]:
    """The product along each node's path."""
    found: list[float] = []
    for parent, own in zip(parents, acceptance, strict=True):
        found.append(own * found[parent] if parent >= 0 else own)
    return found
