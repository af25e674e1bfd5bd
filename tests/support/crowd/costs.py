"""What a step of the modelled device costs, and whose cost it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_DEPTH = 8  # of what the oracle may choose; 0 is plain
SMALLEST_BATCH, LARGEST_BATCH = 1.0, 64.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step: `fixed_s`, `token_s` for each token fed, `level_s` for each level drafted.

    A step is shared equally by the sequences of its batch, and so is a level: they all draft.
    """

    fixed_s: float = 0.006
    token_s: float = 0.00003
    level_s: float = 0.00015

    def batch(self, tokens_per_s: Floats) -> Floats:
        """Sequences that run at once, decoding plainly, when so many tokens are asked for (Little 1961)."""
        free = np.maximum(1.0 - tokens_per_s * self.token_s, 1e-3)
        return np.clip(tokens_per_s * self.fixed_s / free, SMALLEST_BATCH, LARGEST_BATCH)

    def step_s(self, batch: Floats) -> Floats:
        """A plain step."""
        return self.fixed_s + batch * self.token_s

    def round_s(self, batch: Floats) -> Floats:
        """One sequence's share of it."""
        return self.step_s(batch) / batch

    def node_s(self, batch: Floats) -> Floats:
        """A token of a chain: drafted and verified."""
        return self.token_s + self.level_s / batch

    def best_depth(self, alpha: Floats, batch: Floats) -> Ints:
        """[R] argmax over 0..MOST_DEPTH of E[tau] / (1 + gamma * c), math.md section 2."""
        depths = np.arange(MOST_DEPTH + 1)
        expected = np.cumsum(alpha[:, None] ** depths, axis=1)
        c = self.node_s(batch) / self.round_s(batch)
        best: Ints = (expected / (1.0 + depths * c[:, None])).argmax(1)
        return best
