"""The operator's routes: tenants and policies of a running server, and what it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, Query
from pydantic import Field

from gammaray.api.auth import OPERATOR, fingerprint, fresh_key
from gammaray.api.body import StrictRoute
from gammaray.api.client import Planner
from gammaray.api.warmup import Messages, Progress, WarmUps
from gammaray.errors import NotFound, Unauthorized
from gammaray.validation import Strict, shorten

Json = dict[str, Any]
Conversations = Callable[[int, int], Sequence[Messages]]  # so many, of a seed
Target = tuple[
    str, str | None, str | None
]  # a tenant, a class of it, a drafter (in all classes, if none is named)
AUDIT_LIMIT = 1000
OVERVIEW_LIMIT = 100


class Operations(Protocol):
    """What an operator may see and do. All raise Overloaded while the controller is gone.

    What changes something returns when that is safe from any crash. NotFound: there is no such tenant.
    InvalidRequest: it cannot be so.
    """

    async def overview(self, limit: int) -> Json:
        """What the live page shows, with the `limit` busiest tenants."""
        ...

    async def tenants(self) -> Json:
        """Every tenant in a line."""
        ...

    async def tenant(self, name: str) -> Json:
        """Its settings, as the configuration would have them, and how it is."""
        ...

    async def put(self, name: str, settings: Mapping[str, Any]) -> Json:
        """Makes or replaces a tenant."""
        ...

    async def change(self, name: str, patch: Mapping[str, Any]) -> Json:
        """Changes some settings, by a JSON merge patch."""
        ...

    async def remove(self, name: str) -> Json:
        """Its open requests finish; new ones are refused."""
        ...

    async def rotate(self, name: str, sha256: str, key: str | None, grace_s: float) -> Json:
        """Puts a new key in the place of `key`, which stays good for `grace_s`."""
        ...

    async def pin_off(self, target: Target) -> Json:
        """No speculation until `unpin`, whatever is measured."""
        ...

    async def reset(self, target: Target) -> Json:
        """As if it had just been seen first: also out of a violated quality gate."""
        ...

    async def unpin(self, target: Target) -> Json:
        """Leaves it to the controller again."""
        ...

    async def roll_back(self, name: str, what: str, request_class: str) -> Json:
        """A class to its drafter's previous version, or the tenant to its previous draft shapes."""
        ...

    async def kill_switch(self, on: bool) -> Json:
        """On: nobody speculates."""
        ...

    async def split(self, name: str) -> Json:
        """Gives long prompts a class of their own, as the heat map suggests."""
        ...

    async def usage(self, day: str | None) -> Json:
        """Tokens by tenant, of a UTC day; None: today."""
        ...

    async def policies(self) -> Json:
        """The policy that engines and routers follow."""
        ...

    async def audit(self, limit: int) -> Json:
        """The last decisions, newest first."""
        ...

    async def histograms(self) -> Json:
        """Acceptance by tenant, class and drafter, in 25 bins."""
        ...

    async def topology(self) -> Json:
        """GPU islands, and who sits where."""
        ...

    async def profile(self, replica: int, steps: int) -> Json:
        """Captures a replica's next steps with torch's profiler; tells the file, which is on its node."""
        ...


class Rotation(Strict):
    """Which key goes (null: the only one), and how long it stays good."""

    key: str | None = None
    grace_s: float = Field(default=0.0, ge=0, le=30 * 86_400)


class Part(Strict):
    """Of a tenant. Null: all of it; a drafter without a class: in every class."""

    request_class: str | None = Field(default=None, alias="class")
    drafter: str | None = None

    def of(self, tenant: str) -> Target:
        return tenant, self.request_class, self.drafter


class Back(Strict):
    """`drafter`: of a class, to its previous version; `policy`: to the tenant's previous draft shapes."""

    what: Literal["drafter", "policy"]
    request_class: str = Field(default="default", alias="class")


class Switch(Strict):
    """`on`: nobody speculates."""

    on: bool


class Profile(Strict):
    """Of so many steps of a replica of the target."""

    steps: int = Field(default=10, ge=1, le=1000)
    replica: int = Field(default=0, ge=0)


WHOLE = Part()
AT_ONCE = Rotation()


def routes(operations: Operations) -> APIRouter:
    """All of them; the gate lets operators in, and nobody else."""
    router = APIRouter(prefix=OPERATOR, include_in_schema=False, route_class=StrictRoute)
    _add_views(router, operations)
    _add_tenants(router, operations)
    _add_orders(router, operations)
    return router


class WarmUp(Strict):
    """So many synthetic requests, with that drafter or the tenant's own; `seed` decides their texts."""

    requests: int = Field(default=20, ge=1, le=1000)
    seed: int = Field(default=0, ge=0, le=2**32)
    drafter: str | None = None


SOME = WarmUp()


def warm_up_routes(warm_ups: WarmUps, conversations: Conversations, planner: Planner) -> APIRouter:
    """Begin, watch and cancel a tenant's warm-up. It belongs to the ingress process that was asked."""
    router = APIRouter(prefix=OPERATOR, include_in_schema=False, route_class=StrictRoute)

    @router.post("/tenants/{name}/warm-up")
    async def start(name: str, wanted: WarmUp = SOME) -> Progress:
        try:
            planner.limits(name)
        except Unauthorized:
            raise NotFound(
                f"there is no tenant {shorten(ascii(name))}", param="tenant", code="no_tenant"
            ) from None
        return warm_ups.start(name, conversations(wanted.requests, wanted.seed), wanted.drafter)

    @router.get("/tenants/{name}/warm-up")
    async def progress(name: str) -> Progress:
        return warm_ups.progress(name)

    @router.delete("/tenants/{name}/warm-up")
    async def cancel(name: str) -> Progress:
        return await warm_ups.cancel(name)

    return router


def _add_views(router: APIRouter, operations: Operations) -> None:
    @router.get("/overview")
    async def overview(limit: Annotated[int, Query(ge=1)] = OVERVIEW_LIMIT) -> Json:
        return await operations.overview(limit)

    @router.get("/usage")
    async def usage(day: Annotated[date | None, Query()] = None) -> Json:
        return await operations.usage(None if day is None else day.isoformat())

    @router.get("/policies")
    async def policies() -> Json:
        return await operations.policies()

    @router.get("/audit")
    async def audit(limit: Annotated[int, Query(ge=1, le=AUDIT_LIMIT)] = 100) -> Json:
        return await operations.audit(limit)

    @router.get("/histograms")
    async def histograms() -> Json:
        return await operations.histograms()

    @router.get("/topology")
    async def topology() -> Json:
        return await operations.topology()


def _add_tenants(router: APIRouter, operations: Operations) -> None:
    @router.get("/tenants")
    async def tenants() -> Json:
        return await operations.tenants()

    @router.get("/tenants/{name}")
    async def tenant(name: str) -> Json:
        return await operations.tenant(name)

    @router.put("/tenants/{name}")
    async def put(name: str, settings: dict[str, Any]) -> Json:
        return await operations.put(name, settings)

    @router.patch("/tenants/{name}")
    async def change(name: str, patch: dict[str, Any]) -> Json:
        return await operations.change(name, patch)

    @router.delete("/tenants/{name}")
    async def remove(name: str) -> Json:
        await operations.tenant(name)  # a second time it is not there
        return await operations.remove(name)

    @router.post("/tenants/{name}/rotate-key")
    async def rotate(name: str, rotation: Rotation = AT_ONCE) -> Json:
        """The key is in this answer and nowhere else: the controller is told its hash."""
        secret = fresh_key()
        hashed = fingerprint(secret.encode())
        made = await operations.rotate(name, hashed, rotation.key, rotation.grace_s)
        return {**made, "key": secret}


def _add_orders(router: APIRouter, operations: Operations) -> None:
    @router.post("/tenants/{name}/pin-off")
    async def pin_off(name: str, part: Part = WHOLE) -> Json:
        return await operations.pin_off(part.of(name))

    @router.post("/tenants/{name}/unpin")
    async def unpin(name: str, part: Part = WHOLE) -> Json:
        return await operations.unpin(part.of(name))

    @router.post("/tenants/{name}/reset")
    async def reset(name: str, part: Part = WHOLE) -> Json:
        return await operations.reset(part.of(name))

    @router.post("/tenants/{name}/roll-back")
    async def roll_back(name: str, back: Back) -> Json:
        return await operations.roll_back(name, back.what, back.request_class)

    @router.post("/tenants/{name}/suggestion")
    async def split(name: str) -> Json:
        return await operations.split(name)

    @router.post("/profile")
    async def profile(wanted: Profile) -> Json:
        return await operations.profile(wanted.replica, wanted.steps)

    @router.post("/kill-switch")
    async def kill_switch(switch: Switch) -> Json:
        return await operations.kill_switch(switch.on)
