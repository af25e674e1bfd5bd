"""Revisions of a tenant's policy parameters, so that a bad change of draft shapes has a way back."""

from __future__ import annotations

from dataclasses import dataclass

from gammaray.config import Bucket, Tenant
from gammaray.errors import NotFound

KEPT = 8


@dataclass(frozen=True, slots=True)
class Parameters:
    """The draft shapes of a tenant. Whether it speculates at all, and with what, is no part of them."""

    gamma: int
    tree_width: int
    adaptive: bool
    buckets: tuple[Bucket, ...] = ()
    class_buckets: tuple[tuple[str, tuple[Bucket, ...] | None], ...] = ()  # by the class's name


@dataclass(frozen=True, slots=True)
class Revision:
    number: int
    since: float  # s
    parameters: Parameters


Revisions = tuple[Revision, ...]  # of one tenant; the last one is in force, and there is always one


def parameters(tenant: Tenant) -> Parameters:
    speculation = tenant.speculation
    return Parameters(
        speculation.gamma,
        speculation.tree_width,
        speculation.adaptive,
        tuple(tenant.buckets),
        tuple((one.name, None if one.buckets is None else tuple(one.buckets)) for one in tenant.classes),
    )


def note(revisions: Revisions, now_has: Parameters, now: float) -> Revisions:
    """With one more revision, if these are other parameters than the last one's."""
    if revisions and revisions[-1].parameters == now_has:
        return revisions
    number = revisions[-1].number + 1 if revisions else 1
    return (*revisions, Revision(number, now, now_has))[-KEPT:]


def roll_back(revisions: Revisions) -> Revisions:
    """Without the last one. Raises NotFound when it is the only one."""
    if len(revisions) < 2:
        raise NotFound("the policy of this tenant has no previous revision", code="no_previous_policy")
    return revisions[:-1]


def under(tenant: Tenant, shapes: Parameters) -> Tenant:
    """The tenant with these draft shapes; classes that the shapes do not know keep their own."""
    by_class = dict(shapes.class_buckets)
    speculation = {name: getattr(shapes, name) for name in ("gamma", "tree_width", "adaptive")}
    classes = [
        one.model_copy(update={"buckets": _listed(by_class[one.name])}) if one.name in by_class else one
        for one in tenant.classes
    ]
    update = {
        "speculation": tenant.speculation.model_copy(update=speculation),
        "buckets": list(shapes.buckets),
        "classes": classes,
    }
    return tenant.model_copy(update=update)


def _listed(buckets: tuple[Bucket, ...] | None) -> list[Bucket] | None:
    return None if buckets is None else list(buckets)
