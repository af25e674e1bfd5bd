"""Ways to serve the same requests, compared by the device time that they take."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .costs import MOST_DEPTH, Costs, Floats
from .rounds import Served, Texts, serve


@dataclass
class Arms:
    """By tick: `seconds` of the device in each arm, `tokens` in all of them alike, `batches` of the requests.

    The arms: "adaptive" is the product; "oracle" serves each request at the best depth for its acceptance,
    "hindsight" at the one that turned out best for its text, and the depths themselves all alike; 0 is plain.
    """

    costs: Costs
    seconds: list[dict[str | int, float]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    batches: list[Floats] = field(default_factory=list)

    def add(self, texts: Texts, served: Served, alpha: Floats, batch: Floats) -> None:
        """A tick's requests; `served` is the adaptive arm. All [R]."""
        depths = range(MOST_DEPTH + 1)
        fixed = np.stack([self._fixed(texts, depth, batch) for depth in depths])
        best = self.costs.best_depth(alpha, batch)
        self.seconds.append({
            "adaptive": float(served.seconds(self.costs, batch).sum()),
            "oracle": float(fixed[best, np.arange(len(best))].sum()),
            "hindsight": float(fixed.min(0).sum()),
            **dict(zip(depths, fixed.sum(1).tolist(), strict=True)),
        })  # fmt: skip
        self.tokens.append(int(texts.tokens.sum()))
        self.batches.append(batch)

    def _fixed(self, texts: Texts, depth: int, batch: Floats) -> Floats:
        return serve(texts, np.full(len(batch), depth), adaptive=False).seconds(self.costs, batch)

    @property
    def requests(self) -> int:
        return sum(map(len, self.batches))

    @property
    def batch(self) -> tuple[float, float, float]:
        """P5, mean and P95 of the sequences that a request runs with, itself among them."""
        every = np.concatenate(self.batches)
        low, high = np.quantile(every, [0.05, 0.95]).tolist()
        return low, float(every.mean()), high

    def goodput(self, since: int = 0) -> dict[str | int, float]:
        """Tokens per second of a device by arm, from tick `since` on."""
        tokens, ticks = sum(self.tokens[since:]), self.seconds[since:]
        return {arm: tokens / sum(tick[arm] for tick in ticks) for arm in ticks[0]}

    def best_fixed(self) -> int:
        """The best depth for all."""
        goodput = self.goodput()
        return max(range(MOST_DEPTH + 1), key=goodput.__getitem__)
