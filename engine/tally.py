"""Counts of decode rounds while they grow: of one sequence, or of all of one key in a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from gammaray.engine.drafters.base import DraftTree
from gammaray.engine.verifier import Verdict
from gammaray.types import SpeculationStats


@dataclass(slots=True)
class Tally:
    """See SpeculationStats, which `stats` gives."""

    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    tested: int = 0
    levels: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    level_tested: Counter[int] = field(default_factory=Counter)
    level_first: Counter[int] = field(default_factory=Counter)
    level_accepted: Counter[int] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)

    def add(self, drafted: int, tree: DraftTree | None, verdict: Verdict, kept: int) -> None:
        """A round that proposed `drafted` nodes, verified those of `tree`, and whose first `kept` tokens
        survived EOS, stop strings and max_tokens."""
        self.rounds += 1
        self.drafted += drafted
        if tree is not None:
            self.verified += len(tree)
            self.levels += tree.depth
        self.accepted += min(kept, len(verdict.path))
        self.emitted += kept
        self.tested += verdict.tested
        self.lengths[kept] += 1
        for level in range(verdict.tested):
            self.level_tested[level] += 1
        for level, rank in enumerate(verdict.ranks):
            self.level_accepted[level] += 1
            self.level_first[level] += rank == 0
            self.ranks[rank] += 1

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            self.rounds,
            self.drafted,
            self.verified,
            self.accepted,
            self.emitted,
            self.tested,
            self.ranks[0],
            self.levels,
            *(_listed(c) for c in (self.lengths, self.level_tested, self.level_first)),
            *(_listed(c) for c in (self.level_accepted, self.ranks)),
        )


def _listed(counts: Counter[int]) -> tuple[int, ...]:
    return tuple(counts[value] for value in range(max(counts, default=-1) + 1))
