"""What the controller sees and decides, as metrics: gauges of each key and tenant, from its overview."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import nan
from typing import Any, Protocol

from gammaray.telemetry import names
from gammaray.telemetry.labels import Names
from gammaray.telemetry.meters import Meters
from gammaray.telemetry.tables import Rows, Table

Overview = Mapping[str, Any]  # see docs/metrics.md; any number may be None
QUANTILES = {"p5": "0.05", "p50": "0.5", "p95": "0.95", "p99": "0.99"}
PLACES: Mapping[str, int] = {state: place for place, state in enumerate(names.STATES)}
POOLS = ("target", "draft")


class Decided(Protocol):
    """A decision of the controller, of which metrics need no more."""

    @property
    def rule(self) -> str: ...

    @property
    def level(self) -> str: ...


class ControlRecorder:
    """Tenants beyond the limit have no gauges, as ratios do not add up; `gammaray.spec.keys` counts all."""

    def __init__(self, meters: Meters, tenants: int) -> None:
        """`tenants`: how many are told apart."""
        self._tenants, self._limit = Names(tenants), tenants
        self._keys = Table(meters, names.KEY, [*names.KEY_GAUGES.values(), names.KEY_STATE])
        self._quantiles = Table(meters, (*names.KEY, names.QUANTILE), [names.ALPHA_QUANTILE])
        tenant = (names.TENANT, names.STATE, names.REGION)
        self._of_tenants = Table(meters, tenant, [*names.TENANT_GAUGES.values(), names.TENANT_STATE])
        self._states = Table(meters, (names.STATE,), [names.KEYS])
        self._controller = Table(meters, (), names.CONTROLLER)
        self._pools = Table(meters, (names.MEMORY,), names.POOL)
        self._decisions = Table(meters, (names.RULE, names.LEVEL), [names.DECISIONS])

    def record(self, overview: Overview, decisions: Iterable[Decided] = ()) -> None:
        """After a tick. `decisions`: those since the last time."""
        for decision in decisions:
            self._decisions.add((decision.rule, decision.level), 1)
        tenants = overview["tenants"]
        told = self._told(tenants)
        self._of_tenants.replace({_tenant_labels(one): _tenant_row(one) for one in told})
        self._keys.replace({labels: _key_row(key) for labels, key in _keys(told)})
        self._quantiles.replace(_quantiles(told))
        self._states.replace(_states(overview))
        self._controller.replace({(): _controller_row(overview)})
        self._pools.replace(_pools(overview["memory"]))

    def _told(self, tenants: Sequence[Overview]) -> list[Overview]:
        """Those that were told before, then the busiest."""
        self._tenants.keep([one["tenant"] for one in tenants])
        busiest = sorted(tenants, key=lambda one: -(one["requests_per_s"] or 0.0))
        return [one for one in busiest if self._tenants.admits(one["tenant"])]


def _number(value: float | None) -> float:
    return nan if value is None else float(value)


def _place(state: str) -> float:
    return float(PLACES[state])


def _tenant_labels(tenant: Overview) -> tuple[str, ...]:
    return tenant["tenant"], tenant["state"], tenant["region"] or ""


def _tenant_row(tenant: Overview) -> list[float]:
    return [*(_number(tenant[field]) for field in names.TENANT_GAUGES), _place(tenant["state"])]


def _keys(tenants: Iterable[Overview]) -> Iterator[tuple[tuple[str, ...], Overview]]:
    """Each key with its attribute values."""
    for tenant in tenants:
        for one in tenant["classes"]:
            for key in one["keys"]:
                drafter = key["drafter"] or names.NO_DRAFTER
                yield (tenant["tenant"], one["class"], drafter, key["state"], tenant["region"] or ""), key


def _key_row(key: Overview) -> list[float]:
    return [*(_number(key[field]) for field in names.KEY_GAUGES), _place(key["state"])]


def _quantiles(tenants: Iterable[Overview]) -> Rows:
    return {
        (*labels, value): [_number(key["quantiles"][name])]
        for labels, key in _keys(tenants)
        for name, value in QUANTILES.items()
    }


def _states(overview: Overview) -> Rows:
    """Keys by state; of the tenants shown, where the controller does not say it of all."""
    shown = Counter(labels[3] for labels, _ in _keys(overview["tenants"]))
    found = overview.get("states", shown)
    return {(state,): [float(found.get(state, 0))] for state in names.STATES}


def _controller_row(overview: Overview) -> list[float]:
    """In the order of names.CONTROLLER."""
    ratio, age_s = overview["phases"]["draft_per_token_over_AR"], overview["controller"]["age_s"]
    ticked = overview["time"] - _number(age_s)
    return [_number(ratio), ticked, *(float(overview[n]) for n in ("interval_s", "version", "speculation"))]


def _pools(memory: Overview) -> Rows:
    """In the order of names.POOL."""
    fields = ("kv_used", "kv_total", "krr")
    return {(pool,): [_number(memory.get(f"{pool}_{field}")) for field in fields] for pool in POOLS}
