"""What the runs of some prompts say about one arm.

A speed-up is the ratio of two rates, each all tokens by all time: with equal outputs it is the ratio of the
total times. Its interval is a percentile bootstrap over prompts (Efron 1979), 95 %, seeded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gammaray.engine.bench.measure import Measured
from gammaray.engine.local import Run
from gammaray.types import SpeculationStats

ALL = "all"
RESAMPLES = 2000
SEED = 0


@dataclass(frozen=True, slots=True)
class Row:
    """`None`: there was nothing to measure; of an interval, that one prompt has none."""

    drafter: str
    category: str
    prompts: int
    equal: int  # prompts whose output was that of plain decoding
    tokens: int
    rounds: int
    drafted: int  # nodes
    verified: int  # of them
    acceptance: float | None  # as alpha, but of trimmed drafts as well
    alpha: float | None
    tau: float | None
    tok_s: float | None
    plain_tok_s: float | None
    speedup: float | None
    speedup_ci: tuple[float | None, float | None]


def rows(label: str, measured: Sequence[Measured]) -> list[Row]:
    """One of all prompts, and one a category, in the order in which they came."""
    categories = dict.fromkeys(one.prompt.category for one in measured)
    parts = [(ALL, list(measured))]
    parts += [(name, [one for one in measured if one.prompt.category == name]) for name in categories]
    return [_row(label, name, part) for name, part in parts if part]


def _row(label: str, category: str, measured: Sequence[Measured]) -> Row:
    plain, runs = [one.plain for one in measured], [one.runs[label] for one in measured]
    stats = sum((run.stats for run in runs), SpeculationStats())
    tok_s, plain_tok_s = rate(runs), rate(plain)
    return Row(
        drafter=label,
        category=category,
        prompts=len(measured),
        equal=sum(a.ids == b.ids for a, b in zip(plain, runs, strict=True)),
        tokens=sum(len(run.ids) for run in runs),
        rounds=stats.rounds,
        drafted=stats.drafted,
        verified=stats.verified,
        acceptance=stats.acceptance,
        alpha=stats.alpha,
        tau=stats.tau,
        tok_s=tok_s,
        plain_tok_s=plain_tok_s,
        speedup=tok_s / plain_tok_s if tok_s and plain_tok_s else None,
        speedup_ci=interval(plain, runs),
    )


def rate(runs: Sequence[Run]) -> float | None:
    """Tokens after each first one, by the time since it came."""
    seconds = sum(run.decode_s for run in runs)
    return sum(len(run.ids) - 1 for run in runs if run.decode_s) / seconds if seconds else None


def interval(plain: Sequence[Run], runs: Sequence[Run]) -> tuple[float | None, float | None]:
    """Of the speed-up over prompts drawn anew."""
    pairs = [pair for pair in zip(plain, runs, strict=True) if all(run.decode_s for run in pair)]
    if len(pairs) < 2:
        return None, None
    tokens = np.array([[len(run.ids) - 1 for run in pair] for pair in pairs])  # [prompts, 2]
    seconds = np.array([[run.decode_s for run in pair] for pair in pairs])  # [prompts, 2]
    drawn = np.random.default_rng(SEED).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    rates = tokens[drawn].sum(1) / seconds[drawn].sum(1)  # [RESAMPLES, 2]
    low, high = np.percentile(rates[:, 1] / rates[:, 0], [2.5, 97.5]).tolist()
    return low, high
