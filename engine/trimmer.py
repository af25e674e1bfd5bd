"""Trims the drafts of a step, and learns from its verdicts (math.md section 3)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gammaray.engine.calibration import Knowledge, survival
from gammaray.engine.drafters.base import DraftTree
from gammaray.engine.profile import StepProfile
from gammaray.engine.scheduler import Slice
from gammaray.engine.sequence import Sequence as Seq
from gammaray.engine.trim import Draft, Load, trim
from gammaray.engine.verifier import Verdict
from gammaray.types import SpeculationPlan

CHEAP = 1.5  # times a step without any draft: so much may one take in which all drafts are verified whole


@dataclass(slots=True)
class Trimmed:
    """`trees` are what is verified, by rid; `biased` are rids whose draft was open to trimming, so that
    which of its nodes are tested hangs on how likely they are."""

    trees: dict[str, DraftTree]
    biased: frozenset[str] = frozenset()
    nodes: int = 0  # trimmed away


@dataclass(frozen=True, slots=True)
class _Drafted:
    """A tree of the step."""

    sequence: Seq
    tree: DraftTree
    draft: Draft
    survey: bool  # verified whole, though its request's drafts may be trimmed

    @property
    def drafter(self) -> str:
        return self.sequence.request.plan.drafter or ""

    @property
    def sampled(self) -> bool:
        return self.draft.expected is not None


@dataclass(slots=True)
class Trimmer:
    """Of one engine. `state_s`: what a step costs besides drafting and verifying, as measured last."""

    profile: StepProfile
    state_s: float = 0.0
    _known: dict[str, Knowledge] = field(default_factory=lambda: defaultdict(Knowledge))  # by drafter

    def trim(
        self, slices: Sequence[Slice], trees: dict[str, DraftTree], draft_s: Mapping[str, float], step: int
    ) -> Trimmed:
        """`draft_s`: seconds that each drafter took."""
        drafted = list(self._drafts(slices, trees))
        if all(one.draft.fixed for one in drafted):
            return Trimmed(trees)
        load = _load(slices, self.state_s + sum(draft_s.values()))
        kept = trim([one.draft for one in drafted], load, self.profile)
        worth = self._worth(load, list(zip(drafted, kept, strict=True)), draft_s)
        free = [(one, nodes) for one, nodes in zip(drafted, kept, strict=True) if not one.draft.fixed]
        for one in drafted:  # a survey says nothing of itself, but not worth drafting for is so for all
            if one.survey and not worth.get(one.drafter, True):
                one.sequence.pace.trimmed(False, step)
        left = dict(trees)
        for one, nodes in free:
            one.sequence.pace.trimmed(bool(nodes) and (one.sampled or worth[one.drafter]), step)
            if not nodes:
                del left[one.sequence.rid]
            elif len(nodes) < len(one.tree):
                left[one.sequence.rid] = one.tree.subtree(nodes)
        biased = [] if self._costs_nothing(load, drafted) else [one.sequence.rid for one, _ in free]
        cut = sum(len(one.tree) - len(nodes) for one, nodes in free)
        return Trimmed(left, frozenset(biased), cut)

    def learn(self, sequence: Seq, tree: DraftTree | None, verdict: Verdict) -> None:
        if tree is not None:
            known = self._known[sequence.request.plan.drafter or ""]
            known.learn(sequence.pace.rates, tree, verdict)

    def _drafts(self, slices: Sequence[Slice], trees: Mapping[str, DraftTree]) -> Iterator[_Drafted]:
        cheap = self._growth(_load(slices, 0.0), sum(map(len, trees.values()))) <= CHEAP
        by_drafter: dict[str, list[tuple[Seq, DraftTree]]] = defaultdict(list)
        for part in slices:
            if tree := trees.get(part.sequence.rid):
                by_drafter[part.sequence.request.plan.drafter or ""].append((part.sequence, tree))
        for name, pairs in by_drafter.items():
            known = self._known[name]
            said = [known.confidence(sequence.pace.rates, tree) for sequence, tree in pairs]
            accepted = iter(known.curve([value for own in said for value in own]))  # one call for all
            for sequence, tree in pairs:
                open_, own = trims(sequence.request.plan), [next(accepted) for _ in tree.tokens]
                survey = open_ and sequence.pace.survey(sequence.rid, cheap)
                fixed = survey or not open_ or tree.whole
                expected = _expected(known, sequence, tree) if _is_sampled(sequence, tree) else None
                draft = Draft(tree.parents, survival(tree.parents, own), fixed, expected)
                yield _Drafted(sequence, tree, draft, survey)

    def _worth(
        self, load: Load, kept: Sequence[tuple[_Drafted, list[int]]], draft_s: Mapping[str, float]
    ) -> dict[str, bool]:
        """By drafter, whether the step gives as many tokens a second as without what is kept of its drafts,
        and without the time that they took. What is verified in any case stands on both sides.

        Not asked of sampled drafts: it would tell what was drawn, and with the noise that the next draft
        draws with again.
        """
        tau, fed = float(load.requests), load.requests + load.prefill
        gains, nodes = defaultdict[str, float](float), Counter[str]()
        for one, own in kept:
            if one.survey:  # what it costs is no fault of the others
                continue
            gain = sum(one.draft.survival[node] for node in own)
            tau, fed = tau + gain, fed + len(own)
            if not one.draft.fixed:
                gains[one.drafter] += gain
                nodes[one.drafter] += len(own)
        seconds = load.spent_s + self.profile.seconds(fed)
        without = {
            name: load.spent_s - draft_s.get(name, 0.0) + self.profile.seconds(fed - nodes[name])
            for name in gains
        }
        return {name: tau * without[name] >= (tau - gain) * seconds for name, gain in gains.items()}

    def _costs_nothing(self, load: Load, drafted: Sequence[_Drafted]) -> bool:
        """Whether the step takes no longer with all nodes, so that all are kept, whatever they are worth."""
        return self._growth(load, sum(len(one.tree) for one in drafted)) <= 1

    def _growth(self, load: Load, nodes: int) -> float:
        """How many times as long a step takes with so many nodes as without any."""
        fed = load.requests + load.prefill
        least, most = self.profile.column(np.array([fed, fed + nodes]))
        return float(most / least) if least > 0 else 1.0 + float(most)


def _expected(known: Knowledge, sequence: Seq, tree: DraftTree) -> list[float]:
    return survival(tree.parents, known.expected(sequence.pace.rates, tree))


def trims(plan: SpeculationPlan) -> bool:
    """Whether drafts of a request are open to trimming. A probe's are not: they are there to be tested."""
    return plan.adaptive and plan.state != "probe"


def _is_sampled(sequence: Seq, tree: DraftTree) -> bool:
    """Whether exactness hangs on the tree's own draws; it does not where verification is coupled."""
    request = sequence.request
    return (
        tree.drawn != "deterministic"
        and request.plan.verification == "rejection"
        and not request.sampling.greedy
    )


def _load(slices: Sequence[Slice], spent_s: float) -> Load:
    ends = sum(part.pending == part.sequence.pending for part in slices)
    return Load(ends, sum(part.pending for part in slices) - ends, spent_s)
