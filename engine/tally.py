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
    first_hits: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    level_tested: Counter[int] = field(default_factory=Counter)
    level_first: Counter[int] = field(default_factory=Counter)
    level_accepted: Counter[int] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)
    tries: Counter[int] = field(default_factory=Counter)
    hits: Counter[int] = field(default_factory=Counter)

    def add(
        self, drafted: int, tree: DraftTree | None, verdict: Verdict, kept: int, biased: bool = False
    ) -> None:
        """A round that proposed `drafted` nodes, verified those of `tree`, and whose first `kept` tokens
        survived EOS, stop strings and max_tokens. `biased`: its draft was open to trimming."""
        self.rounds += 1
        self.drafted += drafted
        if tree is not None:
            self.verified += len(tree)
            self.levels += tree.depth
        self.accepted += min(kept, len(verdict.path))
        self.emitted += kept
        self.lengths[kept] += 1
        self.first_hits += verdict.ranks.count(0)
        self.tries.update(range(verdict.tested))
        self.hits.update(range(len(verdict.ranks)))
        if not biased:
            self._survey(verdict)

    def _survey(self, verdict: Verdict) -> None:
        """Trimming leaves the likelier nodes, so only what was not trimmed says how good a drafter is."""
        self.tested += verdict.tested
        self.level_tested.update(range(verdict.tested))
        for level, rank in enumerate(verdict.ranks):
            self.level_accepted[level] += 1
            self.level_first[level] += rank == 0
            self.ranks[rank] += 1

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            rounds=self.rounds,
            drafted=self.drafted,
            verified=self.verified,
            accepted=self.accepted,
            emitted=self.emitted,
            tested=self.tested,
            first_accepted=self.ranks[0],
            levels=self.levels,
            lengths=_listed(self.lengths),
            level_tested=_listed(self.level_tested),
            level_first=_listed(self.level_first),
            level_accepted=_listed(self.level_accepted),
            ranks=_listed(self.ranks),
            first_hits=self.first_hits,
            tries=_listed(self.tries),
            hits=_listed(self.hits),
        )


def _listed(counts: Counter[int]) -> tuple[int, ...]:
    return tuple(counts[value] for value in range(max(counts, default=-1) + 1))
