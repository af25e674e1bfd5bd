"""Requests of many tenants whose acceptance has two modes; of some tenants it collapses for a while."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from support.bimodal import MODES, SPREAD, prompt

from .costs import Costs, Floats, Ints
from .rounds import runs

INTERVAL_S = 5.0
HOMES = 3  # replicas of a tenant
HOME_SHARES = (0.6, 0.3, 0.1)
GOOD_SHARES = (0.3, 0.95)  # of a tenant's requests that are of the high mode
COLLAPSING, LONGEST = 0.2, 1 / 3  # share of the tenants, and of the run that it may last
SWING = 0.5  # of the load, over the run
REQUESTS = 1.0  # of a tenant in a tick beyond the first, in the mean over the tenants
INEQUALITY = 1.5  # sigma of their lognormal distribution: few tenants have most of the traffic
TOKENS = (32, 96)  # of an output
POOL = 2000  # different prompts, half of them repetitive


@dataclass(frozen=True, slots=True)
class Requests:
    """Of one tick, [R] each, by the time they come."""

    tenant: Ints
    replica: Ints
    prompt: Ints  # of Traffic.prompts
    alpha: Floats  # acceptance, i.i.d.
    tokens: Ints
    at: Floats  # s after the tick's begin
    run: NDArray[np.int16]  # see Texts


class Traffic:
    """`misled`: share of the requests whose prompt is of the other mode's kind; `collapsing`: of the tenants
    that fall to the low mode for a while."""

    def __init__(
        self,
        tenants: int,
        replicas: int,
        ticks: int,
        misled: float,
        seed: int,
        collapsing: float = COLLAPSING,
    ) -> None:
        self._rng = rng = np.random.default_rng(seed)
        self._ticks, self._misled, self._replicas = ticks, misled, replicas
        self._rates = rng.lognormal(np.log(REQUESTS) - INEQUALITY**2 / 2, INEQUALITY, tenants)
        self._good = rng.uniform(*GOOD_SHARES, tenants)
        self._homes = rng.integers(replicas, size=(tenants, HOMES))
        self._falls = np.where(rng.random(tenants) < collapsing, rng.integers(ticks, size=tenants), ticks)
        self._recovers = self._falls + rng.integers(1, max(2, int(ticks * LONGEST)), size=tenants)
        self.prompts = [tuple(prompt(rng, repeats=i >= POOL // 2)) for i in range(POOL)]

    def tick(self, number: int) -> Requests:
        rng, load = self._rng, 1.0 + SWING * np.sin(2 * np.pi * number / self._ticks)
        more = rng.poisson(self._rates * load)
        tenant = rng.permutation(np.repeat(np.arange(len(more)), 1 + more))
        count = len(tenant)
        good = rng.random(count) < self._good[tenant]
        looks_good = good ^ (rng.random(count) < self._misled)
        collapsed = (self._falls[tenant] <= number) & (number < self._recovers[tenant])
        mean = np.where(good & ~collapsed, MODES[1], MODES[0])
        alpha = rng.beta(SPREAD * mean, SPREAD * (1 - mean))
        home = self._homes[tenant, rng.choice(HOMES, size=count, p=HOME_SHARES)]
        accepted = rng.random((count, TOKENS[1])) < alpha[:, None]
        return Requests(
            tenant,
            home,
            rng.integers(POOL // 2, size=count) + POOL // 2 * looks_good,
            alpha,
            rng.integers(TOKENS[0], TOKENS[1] + 1, count),
            np.sort(rng.uniform(0, INTERVAL_S, count)),
            runs(accepted),
        )

    def batches(self, requests: Requests, costs: Costs) -> Floats:
        """[replicas] sequences that run at once on each in this tick."""
        tokens = np.bincount(requests.replica, requests.tokens, self._replicas)
        return costs.batch(tokens / INTERVAL_S)
