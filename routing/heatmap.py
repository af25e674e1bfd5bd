"""Acceptance by prompt length: where the two go together, the tenant's long prompts deserve a class."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gammaray.routing.histogram import BINS
from gammaray.routing.quality import correlation

SAMPLES = 100  # before anything is flagged
STRONG = 0.7  # |r|
PROMPT_EDGES = 2 ** np.arange(18)  # tokens; longer prompts are in the last bin
ALPHA_EDGES = np.arange(BINS + 1) / BINS
SMALLEST = 0.05  # of the samples, in either part of a split

Tokens = NDArray[np.int64]
Alphas = NDArray[np.float64]


def heatmap(tenant: str, prompt_tokens: Tokens, alphas: Alphas) -> dict[str, Any]:
    """JSON-able, of pairs [n]; r is that of alpha with log(prompt_tokens)."""
    r = correlation(np.log(np.maximum(prompt_tokens, 1)), alphas)
    flagged = len(alphas) >= SAMPLES and r is not None and abs(r) > STRONG
    over = best_split(prompt_tokens, alphas) if flagged else None
    suggestion = {"tenant": tenant, "class": "long", "prompt_tokens_over": over}
    return {
        "tenant": tenant,
        "prompt_edges": PROMPT_EDGES.tolist(),
        "alpha_edges": ALPHA_EDGES.tolist(),
        "counts": counts(prompt_tokens, alphas).tolist(),
        "r": r,
        "flagged": flagged,
        "suggestion": suggestion if over is not None else None,
    }


def counts(prompt_tokens: Tokens, alphas: Alphas) -> Tokens:
    """[prompt bins, alpha bins] requests."""
    clipped = np.clip(prompt_tokens, PROMPT_EDGES[0], PROMPT_EDGES[-1])
    return np.histogram2d(clipped, alphas, bins=(PROMPT_EDGES, ALPHA_EDGES))[0].astype(np.int64)


def best_split(prompt_tokens: Tokens, alphas: Alphas) -> int | None:
    """N, so that alpha varies least within the prompts over N tokens and within the others.

    Each part has at least 5 % of the requests; None where no N does that.
    """
    order = np.argsort(prompt_tokens, kind="stable")
    lengths, sorted_alphas = prompt_tokens[order], alphas[order]
    first = np.arange(1, len(lengths))  # size of the lower part
    smallest = max(1.0, SMALLEST * len(lengths))
    fits = (lengths[1:] > lengths[:-1]) & (np.minimum(first, len(lengths) - first) >= smallest)
    if not fits.any():
        return None
    below = np.cumsum(sorted_alphas)[:-1]
    above = sorted_alphas.sum() - below
    explained = below**2 / first + above**2 / (len(lengths) - first)  # the less is left inside
    return int(lengths[np.where(fits, explained, -np.inf).argmax()])
