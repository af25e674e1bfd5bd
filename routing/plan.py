"""Which drafter, depth and width one request gets: the tenant's policy, narrowed by the request."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gammaray.config import Config, Tenant
from gammaray.errors import InvalidRequest
from gammaray.types import PLAIN, SpeculationPlan
from gammaray.validation import shorten

Notes = tuple[str, ...]


class TenantPlanner:
    """`plan` by the name of the tenant. `pools`: of which tenant's which drafter lives in draft workers."""

    def __init__(self, config: Config, pools: Collection[tuple[str, str]] = ()) -> None:
        self._config = config
        self._drafters = {tenant: _reachable(config, tenant, pools) for tenant in config.tenants}

    def __call__(self, tenant: str, **wish: Any) -> tuple[SpeculationPlan, Notes]:
        return plan(self._config.tenants[tenant], self._drafters[tenant], **wish)


def _reachable(config: Config, tenant: str, pools: Collection[tuple[str, str]]) -> list[str]:
    """Drafters of the target's process, and those of the tenant's own pool: never of another's."""

    def is_here(drafter: str) -> bool:
        owners = {owner for owner, name in pools if name == drafter}
        return tenant in owners or not owners or bool(config.drafting_with(drafter) - owners)

    return [drafter for drafter in config.drafters if is_here(drafter)]


def plan(
    tenant: Tenant,
    drafters: Collection[str],
    *,
    seeded: bool = False,
    enabled: bool | None = None,
    drafter: str | None = None,
    gamma: int | None = None,
    width: int | None = None,
) -> tuple[SpeculationPlan, Notes]:
    """The plan, and one sentence for each wish that was cut back to the tenant's policy.

    The tenant's gamma and tree_width are both its defaults and its ceilings. None leaves the tenant's
    value; gamma 0 decodes plainly. A request whose client gave a seed is verified coupled, so that the seed
    decides its text. Raises InvalidRequest for a drafter that is not configured.
    """
    policy = tenant.speculation
    chosen = _drafter(tenant, drafters, drafter)
    if not policy.enabled:
        return PLAIN, ("speculation is off for this tenant",) if enabled or drafter or gamma else ()
    if enabled is False or gamma == 0:
        return PLAIN, ()
    if chosen is None:
        return PLAIN, ("no drafter is set for this tenant",) if enabled or gamma else ()
    depth, deep = _clamp("gamma", gamma, policy.gamma)
    children, wide = _clamp("width", width, policy.tree_width)
    verification = "coupled" if seeded else policy.verification
    return SpeculationPlan(chosen, depth, children, verification), deep + wide


def _drafter(tenant: Tenant, drafters: Collection[str], wanted: str | None) -> str | None:
    if wanted is None:
        return tenant.drafter
    if wanted not in drafters:
        known = ", ".join(sorted(drafters)) or "none"
        message = f"no drafter is named {shorten(ascii(wanted))}; available: {known}"
        raise InvalidRequest(message, param="speculation.drafter", code="drafter_not_found")
    return wanted


def _clamp(name: str, wanted: int | None, limit: int) -> tuple[int, Notes]:
    if wanted is None or wanted <= limit:
        return limit if wanted is None else wanted, ()
    return limit, (f"{name} {wanted} was cut to {limit}, the limit of this tenant",)
