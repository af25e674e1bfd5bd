"""How one request speculates: key -> tenant -> class -> drafter -> state -> predicted acceptance -> bucket.

The tenant's policy, held back by the controller's, and narrowed by the request's own wish. A tenant without
a drafter decodes plainly. A table of `choices` to begin with, for a tenant that has a head and an independent
drafter (long prompts and high load favour the latter, whose KV and batch are its own):

    choices: [{prompt_tokens_over: 4096, drafter: independent}, {concurrency_over: 32, drafter: independent}]
    drafter: head
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterator
from contextlib import contextmanager

from gammaray.config import Bucket, Config, Limits, Tenant
from gammaray.errors import Unauthorized
from gammaray.routing.briefing import NO_NEWS, Briefing
from gammaray.routing.buckets import pick
from gammaray.routing.case import Case
from gammaray.routing.classes import classify
from gammaray.routing.features import features
from gammaray.routing.sampling import is_among
from gammaray.routing.shape import shape
from gammaray.types import PLAIN, Asked, Forecast, Key, KeyPolicy, Planned, SpeculationPlan

EXPLORED = 0.02  # of the requests that their forecast would let decode plainly
EXPLORING = Bucket(alpha=(0.0, 1.0), gamma=2)


class Router:
    """Plans the requests of one ingress; its event loop calls it, and any thread `brief`.

    `pools`: of which tenant's which drafter lives in draft workers.
    """

    def __init__(
        self, config: Config, pools: Collection[tuple[str, str]] = (), briefing: Briefing = NO_NEWS
    ) -> None:
        self._tenants = config.tenants
        self._shared, self._own = _homes(config, pools)
        self._briefing = briefing
        self._probes: Counter[Key] = Counter()  # open requests of keys in PROBE

    def brief(self, briefing: Briefing) -> None:
        """From the next request on."""
        self._briefing = briefing

    @contextmanager
    def open(self, asked: Asked) -> Iterator[Planned]:
        """The plan of a request that is open inside. Raises InvalidRequest."""
        drafters, briefing = self._own.get(asked.tenant, self._shared), self._briefing
        planned = plan(asked, self._tenant(asked.tenant, briefing), drafters, briefing, self._probes.keys())
        drafter, is_probe = planned.plan.drafter, planned.plan.state == "probe"
        with self._probing((asked.tenant, planned.request_class, drafter), is_probe and drafter is not None):
            yield planned

    def limits(self, tenant: str) -> Limits:
        """Those that hold now."""
        return self._tenant(tenant, self._briefing).limits

    @contextmanager
    def _probing(self, key: Key, is_probe: bool) -> Iterator[None]:
        self._probes.update([key] * is_probe)
        try:
            yield
        finally:
            self._probes.subtract([key] * is_probe)
            self._probes += Counter()  # without those that are 0

    def _tenant(self, name: str, briefing: Briefing) -> Tenant:
        tenants = self._tenants if briefing.tenants is None else briefing.tenants
        if name not in tenants:
            raise Unauthorized("this tenant was removed", code="invalid_api_key")
        return tenants[name]


def _homes(
    config: Config, pools: Collection[tuple[str, str]]
) -> tuple[frozenset[str], dict[str, frozenset[str]]]:
    """Drafters of the target's process, which all tenants reach, and with them those of a tenant's own pool.

    Never those of another tenant's pool.
    """
    owners = {drafter: {tenant for tenant, name in pools if name == drafter} for drafter in config.drafters}
    shared = frozenset(name for name, its in owners.items() if not its or config.drafting_with(name) - its)
    return shared, {owner: shared | {name for tenant, name in pools if tenant == owner} for owner, _ in pools}


def plan(
    asked: Asked,
    tenant: Tenant,
    drafters: Collection[str],
    briefing: Briefing = NO_NEWS,
    probed: Container[Key] = (),
) -> Planned:
    """One request's plan, and notes about what its client wished for and does not get.

    `drafters`: those that the tenant can reach. `probed`: keys of which a probe is open. For one briefing and
    `probed` the plan is a function of the request. A request whose client gave a seed is verified coupled, so
    that the seed decides its text. Raises InvalidRequest for a drafter that is not there.
    """
    case = Case(asked, tenant, classify(tenant, asked), drafters, briefing)
    case.check_wish()
    if case.refuses_drafts:
        return Planned(PLAIN, case.request_class)
    if not tenant.speculation.enabled:
        return _plain(case, PLAIN, "speculation is off for this tenant")
    if not is_among(case.enabled_ratio, asked.request_id, "enabled"):
        return _plain(case, PLAIN, "this request is not in the share of its tenant's that speculates")
    if not briefing.policy.speculation:
        return _plain(
            case, SpeculationPlan(state="pinned_off"), "speculation is off on this server at present"
        )
    last, reason = PLAIN, "no drafter is set for this tenant"
    for drafter in case.candidates():
        policy = case.policy(drafter)
        if _admits(policy, asked, case.key(drafter) in probed):
            return _drafting(case, drafter, policy)
        last = SpeculationPlan(state=policy.state, epoch=policy.epoch)
        reason = (
            f"drafter {drafter!r} is off at present" if policy.stops else f"drafter {drafter!r} is on trial"
        )
    return _plain(case, last, reason)


def _plain(case: Case, plan: SpeculationPlan, reason: str) -> Planned:
    return Planned(plan, case.request_class, notes=(reason,) if case.wants_drafts else ())


def _admits(policy: KeyPolicy, asked: Asked, is_probed: bool) -> bool:
    """Whether the request is in the key's share; of a key in PROBE always one request is open."""
    if policy.stops:
        return False
    if policy.state == "probe" and not is_probed:
        return True
    # These shares of a canary are that of its trial, and not a share of it.
    whole = policy.state in ("shadow", "warmup")
    return is_among(policy.share, asked.request_id, "canary" if whole else "share")


def _drafting(case: Case, drafter: str, policy: KeyPolicy) -> Planned:
    """With the shape that the predicted acceptance deserves; plain if that is none."""
    own, is_shadow = case.tenant.speculation, policy.state == "shadow"
    forecast = _forecast(case, drafter)
    made = shape(case.asked.wish, own, _bucket(case, forecast, policy), policy)
    if made.gamma == 0:
        rest = SpeculationPlan(state=policy.state, epoch=policy.epoch)
        return _plain(case, rest, "too few drafts would be accepted for requests like this one")
    plan = SpeculationPlan(
        drafter,
        made.gamma,
        made.width,
        "coupled" if case.asked.seeded or is_shadow else own.verification,
        own.adaptive,
        policy.state,
        policy.epoch,
        is_shadow,
    )
    trial = (f"drafter {drafter!r} is on trial: the text is decoded plainly",) if is_shadow else ()
    return Planned(plan, case.request_class, forecast, made.notes + (trial if case.wants_drafts else ()))


def _bucket(case: Case, forecast: Forecast, policy: KeyPolicy) -> Bucket | None:
    """In a probe, and for a few other requests, none is plain: else a low forecast, which only drafts can
    prove wrong, would hold for good."""
    found = pick(case.buckets, forecast.alpha)
    if found is None or found.gamma > 0:
        return found
    tried = policy.state == "probe" or is_among(EXPLORED, case.asked.request_id, "explore")
    return EXPLORING if tried else found


def _forecast(case: Case, drafter: str) -> Forecast:
    """By the predictor; without one, or where it cannot tell, by the key's last requests."""
    briefing = case.briefing
    prior = briefing.priors.get(case.key(drafter))
    asked, name = case.asked, case.request_class
    found = features(asked.prompt, asked.temperature, asked.route, name, drafter, prior, briefing.embeddings)
    if briefing.predictor is None:
        return Forecast(found, prior)
    alpha = briefing.predictor.predict(found)
    return Forecast(found, prior if alpha is None else alpha, briefing.predictor.version)
