"""Left-to-right temperatures of confidences (DSpark, arXiv 2607.05147, section 3.2.1).

A confidence sigmoid(z_j) says with which probability the j-th token of a draft is accepted where those before
it were. What decides is their product, the survival (math.md section 3), so each place gets a temperature,
sigmoid(z_j / T_j), fitted from the first place to the last: with those before it fixed, the survival up to
the place has the least expected calibration error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 15
HALF_GRID = [1.05**step for step in range(1, 49)]  # up to about 10
TEMPERATURES = [1.0, *(t for step in HALF_GRID for t in (step, 1 / step))]  # of equal ones that nearest to 1
LEAST = 32  # rounds that get to a place, for a temperature to be fitted there
SURE = 1e-6  # confidences stay so far from 0 and 1, as their logits have to be finite


@dataclass(frozen=True, slots=True)
class Round:
    """A drafted chain and how it ended."""

    confidence: tuple[float, ...]  # of each token
    accepted: int  # tokens, from the first on


@dataclass(frozen=True, slots=True)
class Rounds:
    """N rounds of at most D places, as columns."""

    logits: Tensor  # [N, D] float64, of the confidences
    survived: Tensor  # [N, D] bool: the place and all before it were accepted
    drafted: Tensor  # [N, D] bool: there was a token

    @staticmethod
    def of(rounds: Iterable[Round], depth: int) -> Rounds:
        """Those with a draft; `depth`: tokens of the longest."""
        found = [one for one in rounds if one.confidence]
        said = [[*one.confidence, *[0.5] * (depth - len(one.confidence))] for one in found]
        places = torch.arange(depth)  # [D]
        lengths, accepted = (
            torch.tensor([[size] for size in sizes], dtype=torch.int64).reshape(-1, 1)
            for sizes in ([len(one.confidence) for one in found], [one.accepted for one in found])
        )  # [N, 1] each
        chances = torch.tensor(said, dtype=torch.float64).reshape(-1, depth)
        return Rounds(torch.logit(chances, SURE), places < accepted, places < lengths)

    def survival(self, temperatures: Tensor) -> Tensor:
        """[N, D], as told with temperatures [D]."""
        return (self.logits / temperatures).sigmoid().cumprod(1)

    @property
    def depth(self) -> int:
        return self.logits.shape[1]


@dataclass(frozen=True, slots=True)
class Judged:
    """Expected calibration errors of survival on rounds that no temperature was fitted to."""

    temperatures: tuple[float, ...]
    before: float  # over all places
    after: float
    by_place: tuple[tuple[float, float], ...]  # before and after, of each place
    fitted: int  # rounds
    judged: int

    def to_json(self) -> dict[str, object]:
        return {
            "temperatures": list(self.temperatures),
            "ece_before": self.before,
            "ece_after": self.after,
            "ece_by_place": [list(pair) for pair in self.by_place],
            "rounds_fitted": self.fitted,
            "rounds_judged": self.judged,
        }


def ece(told: Tensor, came: Tensor) -> float:
    """Expected calibration error of chances [M] against outcomes [M]: the mean distance between what was told
    and what came, of `BINS` bins of equal width by what was told (arXiv 1706.04599, eq. 3). 0 of nothing."""
    if not len(told):
        return 0.0
    bins = (told * BINS).long().clamp(0, BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, told.double() - came.double())
    return float(gaps.abs().sum()) / len(told)


def fit(rounds: Rounds) -> tuple[float, ...]:
    """The temperature of each place, by a search over `TEMPERATURES`; 1 where hardly a round got to."""
    found: list[float] = []
    above = torch.ones(len(rounds.logits), dtype=torch.float64)  # [N], survival up to the place
    reached = torch.ones(len(rounds.logits), dtype=torch.bool)  # [N], all places before were accepted
    for place in range(rounds.depth):
        there, came = rounds.drafted[:, place], rounds.survived[:, place]
        told = [above * (rounds.logits[:, place] / each).sigmoid() for each in TEMPERATURES]
        errors = [ece(survival[there], came[there]) for survival in told]
        known = int((there & reached).sum()) >= LEAST
        best = errors.index(min(errors)) if known else TEMPERATURES.index(1.0)
        found.append(TEMPERATURES[best])
        above, reached = told[best], rounds.survived[:, place]
    return tuple(found)


def judge(fitted: Rounds, held_out: Rounds) -> Judged:
    """Temperatures from `fitted`, and what they are worth on `held_out`, of the same depth."""
    temperatures = fit(fitted)
    own = torch.tensor(temperatures, dtype=torch.float64)
    plain, scaled = held_out.survival(torch.ones_like(own)), held_out.survival(own)
    there, came = held_out.drafted, held_out.survived
    return Judged(
        temperatures,
        before=ece(plain[there], came[there]),
        after=ece(scaled[there], came[there]),
        by_place=tuple(
            (ece(plain[mask, place], came[mask, place]), ece(scaled[mask, place], came[mask, place]))
            for place, mask in enumerate(there.T)
        ),
        fitted=len(fitted.logits),
        judged=len(held_out.logits),
    )
