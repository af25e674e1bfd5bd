"""Which drafted nodes the target verifies, of a whole batch: confidence-scheduled verification.

After DSpark (arXiv 2607.05147, Alg. 1), as math.md section 3 has it. A node is worth its survival a, the
chance that all of its path is accepted; a step of B tokens yields tau tokens, at Theta(B) = tau * SPS(B).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gammaray.engine.profile import StepProfile

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Draft:
    """One request's nodes: parents before children, siblings in the order that they are tried."""

    parents: Sequence[int]
    survival: Sequence[float]  # in [0, 1]; of a child at most its parent's
    fixed: bool = False  # all of it is verified
    # Of a sampled draft under rejection: survival as earlier rounds tell it; else None.
    expected: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What the step does besides."""

    requests: int  # that emit a token each without any draft
    prefill: int = 0  # prompt tokens
    spent_s: float = 0.0  # drafting and state: what it has cost, however little is verified


def trim(drafts: Sequence[Draft], load: Load, profile: StepProfile) -> list[list[int]]:
    """Nodes kept of each draft, in their order; with a node its parent is kept.

    Candidates are sorted by (-a, place in the tree), so that a prefix is closed under parents. All are
    deterministic: the prefix is admitted that maximises Theta, over all of them, since a step function has
    local maxima. Any is sampled: Theta of this round would tell what was drawn. Then only the number of
    nodes comes from Theta, with survival as earlier rounds tell it, and the best of this round fill it.
    Where a node stands must not depend on what was drawn later, either: a sampled sibling counts as no
    better than the one tried before it. O(N log N) for N nodes.
    """
    free = [draft for draft in drafts if not draft.fixed]
    fixed = [draft for draft in drafts if draft.fixed]
    tau = load.requests + sum(sum(draft.survival) for draft in fixed)
    base = load.requests + load.prefill + sum(len(draft.parents) for draft in fixed)
    worth = _joined([draft.survival if draft.expected is None else _ranked(draft) for draft in free])
    places = _joined([range(len(draft.parents)) for draft in free])
    order = np.lexsort((places, -worth))
    known = worth[order]
    if any(draft.expected is not None for draft in free):
        told = [draft.survival if draft.expected is None else draft.expected for draft in free]
        known = -np.sort(-_joined(told))
    admitted = iter(_split(order[: best_prefix(known, tau, base, load.spent_s, profile)], free))
    return [list(range(len(draft.parents))) if draft.fixed else next(admitted) for draft in drafts]


def best_prefix(worth: Floats, tau: float, base: int, spent_s: float, profile: StepProfile) -> int:
    """How many of these nodes, in descending order, maximise Theta; the fewest of several. worth [N]"""
    yields = tau + np.concatenate(([0.0], np.cumsum(worth)))  # [1 + N]
    seconds = spent_s + profile.column(base + np.arange(len(yields)))
    if seconds[0] <= 0:  # as far as it costs nothing
        return int(np.searchsorted(seconds, 0.0, side="right")) - 1
    return int(np.argmax(yields / seconds))


def _ranked(draft: Draft) -> list[float]:
    """Survival, no better than that of the parent and of the sibling that is tried before."""
    worth: list[float] = []
    last: dict[int, float] = {}  # of the siblings so far, by parent
    for parent, own in zip(draft.parents, draft.survival, strict=True):
        bound = last.get(parent, worth[parent] if parent >= 0 else 1.0)
        worth.append(min(own, bound))
        last[parent] = worth[-1]
    return worth


def _joined(columns: Sequence[Sequence[float]]) -> Floats:
    return np.array([value for column in columns for value in column], dtype=np.float64)


def _split(places: Places, drafts: Sequence[Draft]) -> list[list[int]]:
    """Places in the joined columns, as nodes of each draft."""
    found = np.sort(places)
    starts = np.cumsum([0, *(len(draft.parents) for draft in drafts)])
    edges = np.searchsorted(found, starts).tolist()
    nodes = found.tolist()
    return [
        [node - start for node in nodes[first:last]]
        for start, first, last in zip(starts.tolist(), edges, edges[1:], strict=False)
    ]
