"""One request that is to be planned, with all that decides it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from gammaray.config import Bucket, Canary, Class, Tenant
from gammaray.errors import InvalidRequest
from gammaray.routing.briefing import Briefing
from gammaray.routing.sampling import is_among
from gammaray.types import FREE, Asked, Key, KeyPolicy
from gammaray.validation import shorten


@dataclass(frozen=True, slots=True)
class Case:
    """`kind` None: the class `default`. `drafters`: those that the tenant can reach."""

    asked: Asked
    tenant: Tenant
    kind: Class | None
    drafters: Collection[str]
    briefing: Briefing

    @property
    def request_class(self) -> str:
        return self.kind.name if self.kind else "default"

    @property
    def enabled_ratio(self) -> float:
        own = self.kind.enabled_ratio if self.kind else None
        return self.tenant.speculation.enabled_ratio if own is None else own

    @property
    def buckets(self) -> list[Bucket]:
        own = self.kind.buckets if self.kind else None
        return self.tenant.buckets if own is None else own

    @property
    def refuses_drafts(self) -> bool:
        return self.asked.wish.enabled is False or self.asked.wish.gamma == 0

    @property
    def wants_drafts(self) -> bool:
        wish = self.asked.wish
        return not self.refuses_drafts and bool(wish.enabled or wish.drafter or wish.gamma)

    def key(self, drafter: str) -> Key:
        return self.asked.tenant, self.request_class, drafter

    def check_wish(self) -> None:
        """Raises InvalidRequest for a drafter that there is not, or not for this tenant."""
        wanted = self.asked.wish.drafter
        if wanted is not None and wanted not in self.drafters:
            known = ", ".join(sorted(self.drafters)) or "none"
            message = f"no drafter is named {shorten(ascii(wanted))}; available: {known}"
            raise InvalidRequest(message, param="speculation.drafter", code="drafter_not_found")

    def candidates(self) -> Iterator[str]:
        """Drafters by rank; the next one is for when the policy keeps this request from the one before."""
        if self.asked.wish.drafter is not None:
            yield self.asked.wish.drafter
            return
        canary, current, configured = self._canary, self._current, self._configured
        if canary and is_among(canary.share, self.asked.request_id, "canary"):
            yield canary.drafter
        if configured not in (None, current) and self.policy(configured).state in ("probe", "ramp"):
            yield configured  # whose class was switched from it: this is its way back
        if current is not None:
            yield current

    def policy(self, drafter: str) -> KeyPolicy:
        """What the controller lets it do here. One on trial that it has not judged is in the shadow."""
        policy, canary = self.briefing.policy, self._canary
        found = policy.of(self.key(drafter))
        if found is FREE and canary and drafter == canary.drafter and self.key(drafter) not in policy.keys:
            return KeyPolicy("shadow", share=canary.share)
        return found

    @property
    def _canary(self) -> Canary | None:
        """The trial, unless its drafter has become, or has always been, the one for this class."""
        canary = self.tenant.speculation.canary
        on_trial = canary and canary.drafter in self.drafters and canary.drafter != self._current
        return canary if on_trial else None

    @property
    def _current(self) -> str | None:
        """The drafter of most requests: what the controller switched to, else what is configured."""
        switched = self.briefing.policy.drafters.get((self.asked.tenant, self.request_class))
        return switched if switched in self.drafters else self._configured

    @property
    def _configured(self) -> str | None:
        own = self.kind.drafter if self.kind else None
        ranked = (own, self._by_load(), self.tenant.drafter)
        return next((drafter for drafter in ranked if drafter in self.drafters), None)

    def _by_load(self) -> str | None:
        length, load = len(self.asked.prompt), self.briefing.concurrency
        for choice in self.tenant.choices:
            if _exceeds(length, choice.prompt_tokens_over) and _exceeds(load, choice.concurrency_over):
                return choice.drafter
        return None


def _exceeds(value: float, limit: int) -> bool:
    """0 asks for nothing, not even for one."""
    return limit == 0 or value > limit
