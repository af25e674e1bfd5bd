"""The last audited texts of each key: their means, and how acceptance goes with them. They decide nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from math import isfinite, nan

import numpy as np

from gammaray.routing.quality import correlation, mean_kl, perplexity
from gammaray.types import Finished, Key, Quality

KEPT = 64  # texts of a key


class Audited:
    """Since this process began."""

    def __init__(self) -> None:
        self._texts: dict[Key, deque[tuple[float, Quality]]] = {}  # acceptance of each; nan: none was tested

    def add(self, ended: Finished) -> None:
        """Takes what an audit found, if there was one."""
        found = ended.quality
        if found is None or found.tokens < 1 or not (isfinite(found.kl) and isfinite(found.perplexity)):
            return  # no mean would recover from a nan; the gate sees it
        accepted = nan if ended.stats.acceptance is None else ended.stats.acceptance
        self._texts.setdefault(ended.key, deque(maxlen=KEPT)).append((accepted, found))

    def keep(self, places: Collection[tuple[str, str]]) -> None:
        """Only these classes of tenants are left."""
        self._texts = {key: texts for key, texts in self._texts.items() if key[:2] in places}

    def keys(self) -> Collection[Key]:
        return self._texts.keys()

    def means(self, key: Key) -> dict[str, float | None]:
        """`kl` in nats and `perplexity` over the tokens of a key's texts."""
        texts = [found for _, found in self._texts.get(key, ())]
        return {"kl": mean_kl(texts), "perplexity": perplexity(texts)}

    def correlations(self, keys: Iterable[Key]) -> dict[str, float | None]:
        """Pearson's r of alpha with `kl` and with `perplexity`, over the texts of all the keys."""
        pairs = [pair for key in keys for pair in self._texts.get(key, ())]
        rows = np.array([(a, found.kl, found.perplexity) for a, found in pairs if a == a]).reshape(-1, 3)
        return {
            "kl": correlation(rows[:, 0], rows[:, 1]),
            "perplexity": correlation(rows[:, 0], rows[:, 2]),
        }
