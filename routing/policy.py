"""What each key may do, as a versioned policy: the worst of the states of its tenant, class and itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gammaray.config import Tenant
from gammaray.routing.book import Book, Fleet
from gammaray.routing.settings import candidate_of, drafter_of
from gammaray.routing.states import Unit
from gammaray.routing.units import CODES
from gammaray.types import FREE, Key, KeyPolicy, PolicySnapshot

PROBE_GAMMA = 2
NODE_CAP = 256  # running sequences x width


def effective(tenant: Unit, request_class: Unit, key: Unit, down: bool, widest: int) -> KeyPolicy:
    """`down`: no draft worker is healthy now. That begins no epoch: requests go on when one is.

    `widest`: children a level.
    """
    levels = (tenant, request_class, key)
    state = max((unit.state for unit in levels), key=CODES.__getitem__)
    probing = any(unit.state == "probe" for unit in levels)
    return KeyPolicy(
        "off" if down and CODES[state] < CODES["off"] else state,
        gamma=min(key.gamma, PROBE_GAMMA) if probing else key.gamma,
        width=1 if probing else min(key.width, widest),
        share=min(unit.share for unit in levels),
        epoch=sum(unit.epoch for unit in levels),
    )


def widest(running: int, limit: int) -> int:
    """By the node cap. What the configured `limit` does not reach is no ceiling, so it need not be told."""
    allowed = max(1, NODE_CAP // max(1, running))
    return allowed if allowed < limit else FREE.width


class Publisher:
    """Makes the next version out of what changed."""

    def __init__(self, version: int) -> None:
        self.policy = PolicySnapshot(version)
        self._keys: dict[Key, KeyPolicy] = {}
        self._told: dict[str, list[Key]] = {}  # keys of a tenant that are in `_keys`
        self._drafters: dict[tuple[str, str], str] = {}
        self._switched: dict[str, list[tuple[str, str]]] = {}  # ... classes in `_drafters`
        self._tenants: Mapping[str, Tenant] = {}
        self._weights: dict[str, float] = {}
        self._kv_shares: dict[str, float] = {}

    def publish(
        self,
        book: Book,
        tenants: Collection[str],
        keys: Collection[Key],
        down: Collection[Fleet],
        running: int,
        on: bool,
    ) -> bool:
        """Whether there is a new version, after changes of these tenants, also such that went, and keys.

        `running`: sequences of the busiest replica. `on`: False is the kill switch.
        """
        news = [self._refresh(book, tenant, down, running) for tenant in tenants]
        news += [self._refresh_key(book, key, down, running) for key in keys if key[0] not in tenants]
        news += [self._configure(book.tenants), on != self.policy.speculation]
        if not any(news):
            return False
        maps = dict(self._keys), self._weights, self._kv_shares, dict(self._drafters)
        self.policy = PolicySnapshot(self.policy.version + 1, on, *maps)
        return True

    def tells(self, book: Book, key: Key, down: Collection[Fleet], running: int) -> bool:
        """Whether the policy has what holds for this key."""
        return self.policy.of(key) == _policy_of(book, key, (key[0], key[2]) in down, running)

    def _refresh(self, book: Book, tenant: str, down: Collection[Fleet], running: int) -> bool:
        before = {key: self._keys.pop(key) for key in self._told.pop(tenant, ())}
        switched = {cls: self._drafters.pop(cls) for cls in self._switched.pop(tenant, ())}
        if tenant not in book.tenants:
            return bool(before or switched)
        after, on_trial = {}, candidate_of(book.tenants[tenant])
        for key in book.possible(tenant):
            policy = _policy_of(book, key, (tenant, key[2]) in down, running)
            if policy != FREE or key[2] == on_trial:  # without an entry it would count as not judged yet
                after[key] = policy
        for name in book.class_names(tenant):
            policy = _policy_of(book, (tenant, name, None), False, running)
            if policy != FREE:
                after[tenant, name, None] = policy
        drafters = {cls: used for cls in book.classes_of(tenant) if (used := _other_drafter(book, cls))}
        self._keys.update(after)
        self._drafters.update(drafters)
        self._told[tenant], self._switched[tenant] = list(after), list(drafters)
        return before != after or switched != drafters

    def _refresh_key(self, book: Book, key: Key, down: Collection[Fleet], running: int) -> bool:
        before, after = self.policy.of(key), _policy_of(book, key, (key[0], key[2]) in down, running)
        if before == after:
            return False
        if key not in self._keys:
            self._told.setdefault(key[0], []).append(key)
        self._keys[key] = after
        return True

    def _configure(self, tenants: Mapping[str, Tenant]) -> bool:
        if tenants is self._tenants:
            return False
        before = self._weights, self._kv_shares
        self._tenants = tenants
        self._weights = {name: one.weight for name, one in tenants.items() if one.weight != 1.0}
        self._kv_shares = {name: one.kv_share for name, one in tenants.items() if one.kv_share != 1.0}
        return before != (self._weights, self._kv_shares)


def _policy_of(book: Book, key: Key, down: bool, running: int) -> KeyPolicy:
    tenant, request_class, _ = key
    units = book.tenant.of(tenant), book.classes.of((tenant, request_class)), book.keys.of(key)
    limit = book.limits(key).width
    return effective(*units, down, widest(running, limit))


def _other_drafter(book: Book, cls: tuple[str, str]) -> str | None:
    used = book.classes.of(cls).drafter
    return used if used != drafter_of(book.tenants[cls[0]], cls[1]) else None
