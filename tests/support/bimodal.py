"""Simulated traffic whose acceptance has two modes, told apart by the prompt or by nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gammaray.routing.features import features
from gammaray.routing.learning import Priors
from gammaray.types import Finished, Forecast, SpeculationStats

MODES = (0.12, 0.62)  # mean acceptance of what is new and of what repeats itself (math.md section 4)
SPREAD = 30.0  # a + b of the Beta distribution around a mode: its standard deviation is 0.06 to 0.09
VOCABULARY = 32_000


def prompt(rng: np.random.Generator, repeats: bool) -> list[int]:
    """20 to 400 tokens: of a phrase again and again, one in ten replaced, or all drawn at random."""
    length = int(np.exp(rng.uniform(np.log(20), np.log(400))))
    drawn = rng.integers(VOCABULARY, size=length)
    if not repeats:
        return drawn.tolist()
    phrase = rng.integers(VOCABULARY, size=rng.integers(5, 13))
    return np.where(rng.random(length) < 0.1, drawn, np.resize(phrase, length)).tolist()


def finished(
    rng: np.random.Generator, mode: int, *, tenant: str, repeats: bool, prior: float | None
) -> Finished:
    """One request that ended, of 32 tested tokens at least."""
    tested = int(rng.integers(32, 400))
    alpha = rng.beta(SPREAD * MODES[mode], SPREAD * (1 - MODES[mode]))
    stats = SpeculationStats(tries=(tested,), first_hits=int(rng.binomial(tested, alpha)))
    ids = prompt(rng, repeats)
    known = features(ids, float(rng.choice([0.0, 0.7, 1.0])), "chat", "default", "lookup", prior)
    return Finished(
        tenant=tenant,
        request_class="default",
        drafter="lookup",
        state="on",
        shadow=False,
        reason="stop",
        fallback=None,
        index=0,
        prompt_tokens=len(ids),
        cached_tokens=0,
        output_tokens=tested,
        stats=stats,
        forecast=Forecast(known),
    )


def traffic(count: int, *, told_apart: bool = True, tenants: int = 4, seed: int = 0) -> Iterator[Finished]:
    """In the order of time, with each tenant's prior as it was then. Tenants have mixtures of their own.

    `told_apart` False: the prompts say nothing of the mode.
    """
    rng, priors = np.random.default_rng(seed), Priors()
    shares = np.linspace(0.3, 0.7, tenants)  # of requests that are accepted well
    for _ in range(count):
        i = int(rng.integers(tenants))
        mode = int(rng.random() < shares[i]) if told_apart else int(rng.random() < 0.5)
        repeats = bool(mode) if told_apart else bool(rng.random() < 0.5)
        key = (f"tenant-{i}", "default", "lookup")
        one = finished(rng, mode, tenant=key[0], repeats=repeats, prior=priors.of(key))
        priors.add(one)
        yield one
