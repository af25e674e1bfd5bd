"""Tenants of a running server: each change gives another roster, whose whole configuration was checked."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gammaray.config import NO_KEYS, Config, Key, Tenant, parse
from gammaray.errors import ConfigError, InvalidRequest, NotFound
from gammaray.validation import shorten

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
FIRST_KEY = "main"
MAX_KEY_NAME = 64
SOURCE = "the change"
NO_POOL = "pool: draft workers are placed when the server starts; change the configuration and restart it"
UNREACHABLE = (
    "drafter {drafter!r} has draft workers for other tenants only; restart the server to give it more"
)


@dataclass(frozen=True, slots=True)
class Roster:
    """`revision` counts the changes. `expiring`: until when (s, Unix) a key is good, by its hash."""

    config: Config
    revision: int = 0
    expiring: Mapping[str, float] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()  # drafters that only draft workers hold, and only for their tenants

    def tenant(self, name: str) -> Tenant:
        """Raises NotFound."""
        if name not in self.config.tenants:
            raise NotFound(f"there is no tenant {shorten(ascii(name))}", param="tenant", code="no_tenant")
        return self.config.tenants[name]

    def notes(self, name: str) -> tuple[str, ...]:
        """What an operator should know of a tenant."""
        return (NO_KEYS,) if name in self.config.unreachable_tenants() else ()


def put(roster: Roster, name: str, tree: object) -> Roster:
    """The tenant is what `tree` says, whether it was there or not. Raises InvalidRequest."""
    if not NAME.fullmatch(name):
        raise InvalidRequest("a tenant's name is up to 64 of A-Z a-z 0-9 . _ -", param="tenant")
    if not isinstance(tree, Mapping):
        raise InvalidRequest("a tenant is a mapping of its settings, such as {drafter: lookup}")
    return _with(roster, name, dict(tree))


def change(roster: Roster, name: str, patch: object) -> Roster:
    """`patch` as a JSON merge patch (RFC 7396): null takes the default back. InvalidRequest or NotFound."""
    if not isinstance(patch, Mapping):
        raise InvalidRequest("a change is a mapping of settings, such as {speculation: {gamma: 3}}")
    return _with(roster, name, merged(describe(roster.tenant(name)), patch))


def remove(roster: Roster, name: str) -> Roster:
    """Without a tenant; its open requests finish. One that is gone already is no error."""
    if name == "default":
        raise InvalidRequest("the tenant `default` is always there; set its limits instead", param="tenant")
    left = {other: tenant for other, tenant in roster.config.tenants.items() if other != name}
    return _checked(roster, left) if len(left) < len(roster.config.tenants) else roster


def rotate(
    roster: Roster, name: str, sha256: str, now: float, grace_s: float = 0.0, key: str | None = None
) -> tuple[Roster, str]:
    """A new key takes the place of `key` (None: of the only one), which is good for `grace_s` more.

    Gives the new key's name. Asked again with the same hash it changes nothing. A tenant without keys gets
    its first. Raises InvalidRequest or NotFound.
    """
    keys = roster.tenant(name).api_keys
    if same := [one.name for one in keys if one.sha256 == sha256]:
        return roster, same[0]
    old = _old_key([one for one in keys if one.sha256 not in roster.expiring], key)
    fresh = Key(name=_next_name(old, [one.name for one in keys]), sha256=sha256)
    kept = [one for one in keys if one != old or grace_s > 0]
    ends = {old.sha256: now + grace_s} if old and grace_s > 0 else {}
    listed = [one.model_dump() for one in (*kept, fresh)]
    after = _with(roster, name, describe(roster.tenant(name)) | {"api_keys": listed})
    return replace(after, expiring={**after.expiring, **ends}), fresh.name


def split(roster: Roster, name: str, cls: str, prompt_tokens_over: int) -> Roster:
    """Long prompts become a class of their own, which comes first. InvalidRequest or NotFound."""
    tree = describe(roster.tenant(name))
    long = {"name": cls, "when": {"prompt_tokens_over": prompt_tokens_over}}
    return _with(roster, name, {**tree, "classes": [long, *tree.get("classes", [])]})


def expire(roster: Roster, now: float) -> Roster:
    """Without keys whose time is over; the same roster when there is none."""
    over = {sha256 for sha256, end in roster.expiring.items() if end <= now}
    if not over:
        return roster
    tenants = {name: _without(tenant, over) for name, tenant in roster.config.tenants.items()}
    return _checked(roster, tenants)


def describe(tenant: Tenant) -> dict[str, Any]:
    """What is set of it, as a configuration would."""
    return tenant.model_dump(mode="json", exclude_defaults=True)


def merged(tree: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """RFC 7396: mappings merge, null removes, anything else replaces."""
    result = dict(tree)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            under = result.get(name)
            result[name] = merged(under if isinstance(under, Mapping) else {}, value)
        else:
            result[name] = value
    return result


def _old_key(keys: Collection[Key], name: str | None) -> Key | None:
    if name is None and len(keys) <= 1:
        return next(iter(keys), None)
    named = [key for key in keys if key.name == name]
    if not named:
        known = ", ".join(sorted(key.name for key in keys)) or "none"
        raise InvalidRequest(f"say which key is to go: {known}", param="key", code="no_key")
    return named[0]


def _next_name(old: Key | None, taken: Collection[str]) -> str:
    """web, web-2, web-3: the access log tells which key a client still uses."""
    if old is None:
        return FIRST_KEY
    stem = re.sub(r"-\d+$", "", old.name)
    number = 2
    while (name := f"{stem[: MAX_KEY_NAME - 1 - len(str(number))]}-{number}") in taken:
        number += 1
    return name


def _without(tenant: Tenant, over: Collection[str]) -> Tenant:
    kept = [key for key in tenant.api_keys if key.sha256 not in over]
    return tenant if len(kept) == len(tenant.api_keys) else tenant.model_copy(update={"api_keys": kept})


def _with(roster: Roster, name: str, tree: Mapping[str, Any]) -> Roster:
    before = roster.config.tenants
    after = _checked(roster, {**before, name: tree})
    _check_placed(before.get(name, Tenant()), after.tenant(name), roster.apart)
    return after


def _checked(roster: Roster, tenants: Mapping[str, object]) -> Roster:
    """Of the whole tree: other tenants and sections are instances, which are not checked twice."""
    try:
        config = parse({**dict(roster.config), "tenants": tenants}, SOURCE)
    except ConfigError as error:
        faults = [line.removeprefix(f"{SOURCE}: ") for line in error.message.splitlines()]
        param = faults[0].partition(": ")[0]
        raise InvalidRequest("; ".join(faults), param=param if " " not in param else None) from None
    known = {key.sha256 for tenant in config.tenants.values() for key in tenant.api_keys}
    expiring = {sha256: end for sha256, end in roster.expiring.items() if sha256 in known}
    return replace(roster, config=config, revision=roster.revision + 1, expiring=expiring)


def _check_placed(before: Tenant, after: Tenant, apart: Collection[str]) -> None:
    """Where drafters run is decided at the start."""
    if after.pool != before.pool:
        raise InvalidRequest(NO_POOL, param="pool")
    had = {drafter for _, drafter in before.named_drafters()}
    for place, drafter in after.named_drafters():
        if drafter in apart and drafter not in had:
            raise InvalidRequest(UNREACHABLE.format(drafter=drafter), param=place)
