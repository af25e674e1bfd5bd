"""How requests are planned: some tenants' with the router's own code, the others' with arrays like it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

import numpy as np

from gammaray.config import Tenant
from gammaray.routing.briefing import Briefing
from gammaray.routing.features import PRIOR, features
from gammaray.routing.plan import plan
from gammaray.types import Asked, Forecast, Key, Planned

from .costs import Floats, Ints
from .rounds import TEMPERATURE, Bools, Texts
from .traffic import INTERVAL_S, Requests

CLASS, DRAFTER = "default", "lookup"
ROUTE: Literal["completions"] = "completions"
TENANT = Tenant.model_validate({
    "drafter": DRAFTER,
    "speculation": {"gamma": 4},  # while nothing is foretold
    "buckets": [
        {"alpha": [0.7, 1.0], "gamma": 6},
        {"alpha": [0.5, 0.7], "gamma": 4},
        {"alpha": [0.3, 0.5], "gamma": 2},
        {"alpha": [0.0, 0.3], "gamma": 0},
    ],
})  # fmt: skip


def key(tenant: str) -> Key:
    return tenant, CLASS, DRAFTER


@dataclass(frozen=True, slots=True)
class Plans:
    """[R] of a tick's requests. `deepest`: as planned and as the key's policy allows; 0 is plain."""

    deepest: Ints
    forecasts: list[Forecast]


class Crowd:
    """Plans with arrays. The predictor is asked once for each prompt, at the mean of the priors then."""

    def __init__(self, tenants: Sequence[str], prompts: Sequence[tuple[int, ...]], seed: int) -> None:
        self._at = {key(name): i for i, name in enumerate(tenants)}
        self._known = [features(p, TEMPERATURE, ROUTE, CLASS, DRAFTER, None) for p in prompts]
        self._rng = np.random.default_rng(seed)
        self._told: tuple[int, Floats] = (0, np.empty(0))  # version of the predictor, its word on each prompt

    def plan(self, requests: Requests, briefing: Briefing, texts: Texts) -> Plans:
        prior = np.full(len(self._at), np.nan)
        for one, value in briefing.priors.items():
            prior[self._at[one]] = value
        alphas = self._foretold(prior, requests, briefing)
        ceiling, admitted = self._policies(requests, briefing, texts)
        own = np.where(np.isnan(alphas), TENANT.speculation.gamma, _bucket_depths(alphas))
        told: list[Floats] = [prior[requests.tenant], alphas]
        forecasts = [
            Forecast(_with_prior(self._known[prompt], before), None if alpha != alpha else alpha)
            for prompt, before, alpha in zip(
                requests.prompt.tolist(), *(t.tolist() for t in told), strict=True
            )
        ]
        return Plans(np.where(admitted, np.minimum(own, ceiling), 0), forecasts)

    def _foretold(self, prior: Floats, requests: Requests, briefing: Briefing) -> Floats:
        predictor = briefing.predictor
        if predictor is None or predictor.predict(self._known[0]) is None:
            return prior[requests.tenant]
        if predictor.version != self._told[0]:
            mean = np.nan if np.isnan(prior).all() else float(np.nanmean(prior))
            words = [predictor.predict(_with_prior(one, mean)) for one in self._known]
            self._told = predictor.version, np.array(words, np.float64)
        return self._told[1][requests.prompt]

    def _policies(self, requests: Requests, briefing: Briefing, texts: Texts) -> tuple[Ints, Bools]:
        """([R], [R]) the ceiling of the depth, and whether a request is let in."""
        count = len(self._at)
        gamma, share = np.full(count, TENANT.buckets[0].gamma), np.ones(count)
        probing = np.zeros(count, np.bool_)
        for one, policy in briefing.policy.keys.items():
            if (at := self._at.get(one)) is not None:
                gamma[at], share[at] = policy.gamma, 0.0 if policy.stops else policy.share
                probing[at] = policy.state == "probe"
        open_s = texts.tokens * texts.base_s
        rate = np.bincount(requests.tenant, minlength=count)[requests.tenant] / INTERVAL_S
        lone = 1.0 / (1.0 + rate * open_s)  # of those that come, who find no probe open (Erlang, one server)
        chance = np.where(
            probing[requests.tenant], np.maximum(share[requests.tenant], lone), share[requests.tenant]
        )
        return gamma[requests.tenant], self._rng.random(len(chance)) < chance


class Router:
    """Plans with `gammaray.routing.plan`, request by request; knows which probes are open."""

    def __init__(self, prompts: Sequence[tuple[int, ...]]) -> None:
        self._prompts = prompts
        self._probes: list[tuple[float, Key]] = []  # by the time of their end
        self._count = 0

    def plan(self, tenant: str, prompt: int, at: float, open_s: float, briefing: Briefing) -> Planned:
        """`at` never falls. `open_s`: how long the request is open at most."""
        self._count += 1
        while self._probes and self._probes[0][0] <= at:
            heappop(self._probes)
        asked = Asked(f"r{self._count}", tenant, ROUTE, self._prompts[prompt], temperature=TEMPERATURE)
        planned = plan(asked, TENANT, (DRAFTER,), briefing, self._open)
        if planned.plan.drafter and planned.plan.state == "probe":
            heappush(self._probes, (at + open_s, key(tenant)))
        return planned

    @property
    def _open(self) -> Collection[Key]:
        return {probed for _, probed in self._probes}


def deepest(planned: Planned, tenant: str, briefing: Briefing) -> int:
    """Of a request's rounds, before its breaker."""
    return min(planned.plan.gamma, briefing.policy.of(key(tenant)).gamma) if planned.plan.drafter else 0


def _bucket_depths(alphas: Floats) -> Ints:
    """`buckets.pick` of [R]."""
    lows = [bucket.alpha[0] for bucket in TENANT.buckets]
    return np.select([alphas >= low for low in lows], [bucket.gamma for bucket in TENANT.buckets])


def _with_prior(known: tuple[float, ...], prior: float) -> tuple[float, ...]:
    return (*known[:PRIOR], prior, *known[PRIOR + 1 :])
