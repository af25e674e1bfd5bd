"""Ways to serve the same requests, compared by the device time that they take."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .costs import MOST_DEPTH, Costs, Floats, Ints
from .rounds import Served, Texts, serve


@dataclass
class Arms:
    """Device seconds by arm, of all requests that were added, and the tokens of those."""

    costs: Costs
    requests: int = 0
    tokens: int = 0
    adaptive_s: float = 0.0
    oracle_s: float = 0.0  # each request at the best depth for its acceptance
    hindsight_s: float = 0.0  # ... at the depth that turned out best for its text
    fixed_s: Floats = field(default_factory=lambda: np.zeros(MOST_DEPTH + 1))  # all at one depth; 0 is plain
    batches: list[Floats] = field(default_factory=list)

    def add(self, texts: Texts, served: Served, alpha: Floats, batch: Floats) -> None:
        """`served` is the adaptive arm. All [R]."""
        seconds = np.stack([self._fixed(texts, depth, batch) for depth in range(MOST_DEPTH + 1)])
        best = self.costs.best_depth(alpha, batch)
        self.requests += len(alpha)
        self.tokens += int(texts.tokens.sum())
        self.adaptive_s += float(served.seconds(self.costs, batch).sum())
        self.oracle_s += float(seconds[best, np.arange(len(best))].sum())
        self.hindsight_s += float(seconds.min(0).sum())
        self.fixed_s += seconds.sum(1)
        self.batches.append(batch)

    @property
    def batch(self) -> tuple[float, float, float]:
        """P5, mean and P95 of the sequences that a request runs with, itself among them."""
        every = np.concatenate(self.batches)
        low, high = np.quantile(every, [0.05, 0.95]).tolist()
        return low, float(every.mean()), high

    def _fixed(self, texts: Texts, depth: int, batch: Floats) -> Floats:
        depths: Ints = np.full(len(batch), depth)
        return serve(texts, depths, adaptive=False).seconds(self.costs, batch)

    def goodput(self) -> dict[str, float]:
        """Tokens per second of a device, by arm."""
        best = int(self.fixed_s.argmin())
        seconds = {
            "oracle": self.oracle_s,
            "hindsight": self.hindsight_s,
            "adaptive": self.adaptive_s,
            "best_fixed": float(self.fixed_s[best]),
            "off": float(self.fixed_s[0]),
        }
        return {name: self.tokens / each for name, each in seconds.items()} | {"best_fixed_gamma": best}
