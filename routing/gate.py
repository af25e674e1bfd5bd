"""The KL gate: which keys are to be compared with the dense model, and what the comparison says.

A key is audited when it becomes active (it, or its drafter's version, is new) and every 24 h of activity. An
audit takes the next texts of the key until they have 200 tokens together: engines compare one at a time, of
at most 256 tokens, and tell the result with the sequence that ended (types.Quality).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import nsmallest
from math import inf
from typing import Literal

from gammaray.routing.audited import Audited
from gammaray.routing.quality import TOKENS, mean_kl
from gammaray.types import Finished, Key, PolicySnapshot, Quality

EVERY_S = 86_400.0
ACTIVE_S = 60.0  # without a finished request a key is idle
AT_ONCE = 64  # keys under audit: each costs an engine dense passes, and a snapshot some bytes


@dataclass(frozen=True, slots=True)
class Audit:
    """One key's: when the last was done, and the texts of the one that goes on."""

    version: str  # of the drafter
    done: float | None = None  # s; None: never under this version
    violated: bool = False  # the last one did
    texts: tuple[Quality, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """`kl` in nats, over so many tokens."""

    outcome: Literal["pass", "violation"]
    kl: float
    tokens: int
    threshold: float

    @property
    def reason(self) -> str:
        relation = "exceeds" if self.outcome == "violation" else "is within"
        return f"KL {self.kl:.4g} over {self.tokens} tokens {relation} {self.threshold:g} nats"


def is_due(audit: Audit | None, version: str, now: float) -> bool:
    """One that violated is due as soon as its key is active again."""
    if audit is None or audit.version != version or audit.done is None or audit.violated:
        return True
    return now - audit.done >= EVERY_S


def due(
    active: Iterable[Key],
    audits: Mapping[Key, Audit],
    versions: Mapping[str, str],
    now: float,
    most: int = AT_ONCE,
) -> frozenset[Key]:
    """Which of the active keys to audit: those that never were first, then the oldest audits.

    `versions` of all their drafters; plain decoding is the dense model itself.
    """
    waiting = []
    for key in active:
        tenant, request_class, drafter = key
        if drafter is not None and is_due(audits.get(key), versions[drafter], now):
            done = audits[key].done if key in audits else None
            waiting.append((-inf if done is None else done, tenant, request_class, drafter, key))
    return frozenset(key for *_, key in nsmallest(most, waiting))


def observe(audit: Audit | None, version: str, found: Quality, now: float) -> Audit:
    """After one more text was compared; one that comes when no audit is due changes nothing."""
    if audit is None or audit.version != version:
        audit = Audit(version)
    if not is_due(audit, version, now):
        return audit
    return replace(audit, texts=(*audit.texts, found))


def conclude(audit: Audit, threshold: float) -> Finding | None:
    """None: the audit has too few tokens. A KL that is no number violates any threshold."""
    kl, tokens = mean_kl(audit.texts), sum(text.tokens for text in audit.texts)
    if kl is None or tokens < TOKENS:
        return None
    return Finding("pass" if kl <= threshold else "violation", kl, tokens, threshold)


def close(audit: Audit, found: Finding, now: float) -> Audit:
    return Audit(audit.version, now, found.outcome == "violation")


class Gate:
    """Audits of the keys of all tenants."""

    def __init__(self) -> None:
        self.audited = Audited()
        self.audits: dict[Key, Audit] = {}
        self._active: dict[Key, float] = {}  # when a request of it ended last (s)

    def see(self, ended: Finished, versions: Mapping[str, str], now: float) -> None:
        """A request that ended. `versions` of all drafters."""
        key, found = ended.key, ended.quality
        version = versions.get(ended.drafter or "")
        if version is None:
            return
        self._active[key] = now
        if found is not None and found.tokens > 0:
            self.audited.add(ended)
            self.audits[key] = observe(self.audits.get(key), version, found, now)

    def conclude(
        self, policy: PolicySnapshot, threshold: Callable[[Key], float], now: float
    ) -> list[tuple[Key, Finding]]:
        """Closes the audits that have enough texts. What a key emits once it is off tells nothing."""
        found = []
        for key in sorted(self._active.keys() & self.audits.keys(), key=str):
            audit = self.audits[key]
            if policy.of(key).stops:
                self.audits[key] = replace(audit, texts=())
            elif (finding := conclude(audit, threshold(key))) is not None:
                self.audits[key] = close(audit, finding, now)
                found.append((key, finding))
        return found

    def due(self, policy: PolicySnapshot, versions: Mapping[str, str], now: float) -> frozenset[Key]:
        """Keys to audit; none that is off, and none that idles, as others may wait for its place."""
        self._active = {key: at for key, at in self._active.items() if now - at < ACTIVE_S}
        speaking = (key for key in self._active if not policy.of(key).stops)
        return due(speaking, self.audits, versions, now)

    def keep(self, places: Collection[tuple[str, str]]) -> None:
        """Only these classes of tenants are left."""
        self.audited.keep(places)
        self.audits = {key: audit for key, audit in self.audits.items() if key[:2] in places}
        self._active = {key: at for key, at in self._active.items() if key[:2] in places}
