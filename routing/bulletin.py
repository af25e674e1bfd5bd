"""What the controller tells whoever asks: replicas get the policy, ingresses all that routes a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gammaray.config import Tenant
from gammaray.routing.briefing import Predictor
from gammaray.types import Key, PolicySnapshot


@dataclass(frozen=True, slots=True)
class Origin:
    """The replica that windows come from, in this life: after a restart `source` is another one."""

    source: str
    node: str = ""
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """To a replica. Its windows up to `kept` are safe; it sends those behind again."""

    policy: PolicySnapshot
    kept: int
    tick_in_s: float = 0.0  # until the controller decides next; 0: not known


@dataclass(frozen=True, slots=True)
class Known:
    """What an ingress has. The default: nothing."""

    edition: str = ""
    revision: int = -1  # of the tenants
    predictor: int = 0  # its version


@dataclass(frozen=True, slots=True)
class Bulletin:
    """Of one edition: none has the name of another, also not of a controller before this one."""

    edition: str
    policy: PolicySnapshot
    revision: int
    tenants: Mapping[str, Tenant] | None  # None: as known
    day_ends: float  # s, Unix
    used_today: Mapping[str, int] = field(default_factory=dict)  # tokens, of tenants with a limit of a day
    priors: Mapping[Key, float] = field(default_factory=dict)
    predictor: Predictor | None = None  # None: as known
    concurrency: float = 0.0  # running sequences of a replica, in the mean
