"""What a tenant's configuration says of its classes, their drafters, and the limits of each unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gammaray.config import Class, Tenant
from gammaray.drafter_config import WEIGHTLESS
from gammaray.routing.states import Limits
from gammaray.types import WARMUP_CLASS

WARMUP_S = 1800.0  # of a drafter that has weights, so also caches and kernels to warm


def classes(tenant: Tenant) -> list[str]:
    """Names, that of the class where no other fits first."""
    return ["default", *(one.name for one in tenant.classes)]


def class_of(tenant: Tenant, name: str) -> Class | None:
    return next((one for one in tenant.classes if one.name == name), None)


def drafter_of(tenant: Tenant, name: str) -> str | None:
    """As configured."""
    one = class_of(tenant, name)
    return one.drafter if one and one.drafter else tenant.drafter


def candidate_of(tenant: Tenant) -> str | None:
    canary = tenant.speculation.canary
    return canary.drafter if canary else None


def alternatives(tenant: Tenant, name: str) -> Iterator[str]:
    """Drafters that the class may be switched to, the best first."""
    one = class_of(tenant, name)
    named = (drafter_of(tenant, name), one.fallback_drafter if one else None, tenant.fallback_drafter)
    yield from dict.fromkeys(drafter for drafter in named if drafter)


def drafters(tenant: Tenant) -> list[str]:
    return list(dict.fromkeys(drafter for _, drafter in tenant.named_drafters()))


def tenant_limits(name: str, tenant: Tenant) -> Limits:
    own = tenant.speculation
    return Limits("tenant", name, own.gamma, own.tree_width, own.adaptive,
                  own.fallback_on_alpha_below, own.disable_on_fallback_rate_above)  # fmt: skip


def class_limits(name: str, tenant: Tenant, request_class: str) -> Limits:
    own, (gamma, width) = tenant.speculation, _shape(tenant, request_class)
    return Limits("class", f"{name}/{request_class}", gamma, width, own.adaptive,
                  own.fallback_on_alpha_below, own.disable_on_fallback_rate_above)  # fmt: skip


def key_limits(
    name: str, tenant: Tenant, request_class: str, drafter: str, methods: Mapping[str, str]
) -> Limits:
    own, (gamma, width) = tenant.speculation, _shape(tenant, request_class)
    warmup_s = 0.0 if request_class == WARMUP_CLASS else _warmup_s(tenant, methods.get(drafter))
    share = own.canary.share if own.canary else 1.0
    full = f"{name}/{request_class}/{drafter}"
    return Limits("key", full, gamma, width, own.adaptive, own.fallback_on_alpha_below,
                  own.disable_on_fallback_rate_above, warmup_s, share)  # fmt: skip


def _shape(tenant: Tenant, request_class: str) -> tuple[int, int]:
    """The deepest and widest that any bucket allows."""
    one = class_of(tenant, request_class)
    buckets = tenant.buckets if one is None or one.buckets is None else one.buckets
    own = tenant.speculation
    depths = [own.gamma, *(bucket.gamma for bucket in buckets)]
    return max(depths), max([own.tree_width, *(bucket.width for bucket in buckets)])


def _warmup_s(tenant: Tenant, method: str | None) -> float:
    if tenant.warmup_s is not None:
        return tenant.warmup_s
    return 0.0 if method in WEIGHTLESS else WARMUP_S
