"""The operator's side of the controller: what it is asked, and what it answers, as JSON."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from gammaray.actors.desk import Back, Desk
from gammaray.errors import InvalidRequest, NotFound
from gammaray.routing import tenants
from gammaray.routing.ledger import NONE, Usage
from gammaray.routing.orders import Order, kill_switch
from gammaray.routing.tenants import Roster
from gammaray.types import Key, KeyPolicy

logger = logging.getLogger(__name__)

Json = dict[str, Any]
Target = tuple[str, str | None, str | None]  # tenant, class, drafter (in all classes, if none is named)
DAY = re.compile(r"\d{4}-\d\d-\d\d")


class Front:
    """Raises InvalidRequest and NotFound. What changes something is safe from any crash when it returns.

    Asked twice, as Ray does after a crash, everything is as if asked once.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def overview(self, limit: int) -> Json:
        return self._desk.overview(limit)

    def tenants(self) -> Json:
        roster, used = self._desk.roster, self._desk.ledger.day(self._desk.today)
        lines = [
            {
                "tenant": name,
                "state": self._desk.state(name),
                "drafter": tenant.drafter,
                "region": tenant.region,
                "keys": len(tenant.api_keys),
                "tokens_today": used.get(name, NONE).tokens,
                "tokens_per_day": tenant.limits.tokens_per_day,
            }
            for name, tenant in sorted(roster.config.tenants.items())
        ]
        return {"revision": roster.revision, "tenants": lines}

    def tenant(self, name: str) -> Json:
        tenant = self._desk.roster.tenant(name)
        used = self._desk.ledger.day(self._desk.today).get(name, NONE)
        return self._settings(self._desk.roster, name) | {
            "state": self._desk.state(name),
            "today": _usage(used) | {"tokens_per_day": tenant.limits.tokens_per_day},
        }

    def put(self, name: str, settings: Mapping[str, Any]) -> Json:
        return self._change(name, "put", lambda roster, now: tenants.put(roster, name, settings))

    def change(self, name: str, patch: Mapping[str, Any]) -> Json:
        return self._change(name, "changed", lambda roster, now: tenants.change(roster, name, patch))

    def remove(self, name: str) -> Json:
        roster = self._desk.change(lambda roster, now: tenants.remove(roster, name))
        logger.info("tenant %r was removed (revision %d)", name, roster.revision)
        return {"tenant": name, "removed": True, "revision": roster.revision}

    def rotate(self, name: str, sha256: str, key: str | None, grace_s: float) -> Json:
        made = ""

        def make(roster: Roster, now: float) -> Roster:
            nonlocal made
            after, made = tenants.rotate(roster, name, sha256, now, grace_s, key)
            return after

        changed = self._change(name, "given a new key", make)
        return {"tenant": name, "name": made, "sha256": sha256, "revision": changed["revision"]}

    def split(self, name: str) -> Json:
        """As the tenant's heat map suggests."""
        self._desk.roster.tenant(name)
        found = self._desk.suggestion(name)
        if found is None:
            message = (
                f"nothing is suggested for {name!r}: its acceptance does not hang on the prompt's length"
            )
            raise NotFound(message, param="tenant", code="no_suggestion")
        cls, tokens = found["class"], found["prompt_tokens_over"]
        return self._change(name, "split", lambda roster, now: tenants.split(roster, name, cls, tokens))

    def pin_off(self, target: Target) -> Json:
        return self._order(Order("pin_off", *target))

    def reset(self, target: Target) -> Json:
        return self._order(Order("reset", *target))

    def unpin(self, target: Target) -> Json:
        return self._order(Order("unpin", *target))

    def roll_back(self, name: str, what: Back, request_class: str) -> Json:
        self._desk.roster.tenant(name)
        decided = self._desk.roll_back(name, what, request_class)
        version = self._desk.policy.version
        return {
            "tenant": name,
            "what": what,
            "class": request_class,
            "changed": len(decided),
            "version": version,
        }

    def kill_switch(self, on: bool) -> Json:
        decided = self._desk.order(kill_switch(on))
        policy = self._desk.policy
        return {"on": not policy.speculation, "changed": len(decided), "version": policy.version}

    def usage(self, day: str | None) -> Json:
        if day is not None and not DAY.fullmatch(day):
            raise InvalidRequest("a day is written as 2026-11-30", param="day")
        name = day or self._desk.today
        ledger = self._desk.ledger
        used = {tenant: _usage(one) for tenant, one in sorted(ledger.day(name).items())}
        return {"day": name, "days": list(ledger.names), "tenants": used}

    def policies(self) -> Json:
        policy = self._desk.policy
        switched = [{"tenant": t, "class": c, "drafter": d} for (t, c), d in sorted(policy.drafters.items())]
        return {
            "version": policy.version,
            "speculation": policy.speculation,
            "keys": [_policy(key, one) for key, one in sorted(policy.keys.items(), key=_by_name)],
            "drafters": switched,
            "weights": dict(policy.weights),
            "kv_shares": dict(policy.kv_shares),
        }

    def audit(self, limit: int) -> Json:
        return {"records": self._desk.records(limit)}

    def histograms(self) -> Json:
        every = self._desk.overview(len(self._desk.roster.config.tenants))["tenants"]
        lines = [
            {
                "tenant": tenant["tenant"],
                "class": one["class"],
                "drafter": key["drafter"],
                **{name: key[name] for name in ("histogram", "peaks", "bimodal", "quantiles")},
            }
            for tenant in every
            for one in tenant["classes"]
            for key in one["keys"]
        ]
        return {"histograms": lines}

    def topology(self) -> Json:
        return dict(self._desk.mandate.placement)

    def _order(self, order: Order) -> Json:
        decided = self._desk.order(order)
        return {
            "tenant": order.tenant,
            "class": order.request_class,
            "drafter": order.drafter,
            "changed": len(decided),
            "version": self._desk.policy.version,
        }

    def _change(self, name: str, what: str, make: Callable[[Roster, float], Roster]) -> Json:
        roster = self._desk.change(make)
        logger.info("tenant %r was %s (revision %d)", name, what, roster.revision)
        return self._settings(roster, name)

    @staticmethod
    def _settings(roster: Roster, name: str) -> Json:
        settings = tenants.describe(roster.tenant(name))
        ends = [
            {"name": key.name, "until": roster.expiring[key.sha256]}
            for key in roster.tenant(name).api_keys
            if key.sha256 in roster.expiring
        ]
        return {
            "tenant": name,
            "revision": roster.revision,
            "settings": settings,
            "expiring": ends,
            "notes": list(roster.notes(name)),
        }


def _usage(used: Usage) -> Json:
    return asdict(used) | {"tokens": used.tokens}


def _policy(key: Key, policy: KeyPolicy) -> Json:
    tenant, cls, drafter = key
    return {"tenant": tenant, "class": cls, "drafter": drafter, **asdict(policy)}


def _by_name(item: tuple[Key, KeyPolicy]) -> tuple[str, str, str]:
    tenant, cls, drafter = item[0]
    return tenant, cls, drafter or ""
