"""What a router is told while it runs: replaced as a whole, so that a plan has one state of things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gammaray.config import Tenant
from gammaray.types import Key, PolicySnapshot


class Predictor(Protocol):
    """Foretells the acceptance of a request from its features."""

    @property
    def version(self) -> int:
        """Counts what was learnt."""
        ...

    def predict(self, features: Sequence[float]) -> float | None:
        """Between 0 and 1; None: it cannot tell."""
        ...


@dataclass(frozen=True, slots=True)
class Briefing:
    """The default: all is allowed, nothing is foretold."""

    policy: PolicySnapshot = field(default_factory=PolicySnapshot)
    revision: int = 0  # of `tenants`
    tenants: Mapping[str, Tenant] | None = None  # None: those of the configuration
    priors: Mapping[Key, float] = field(default_factory=dict)  # acceptance of a key's last requests, an EWMA
    predictor: Predictor | None = None  # None: the priors foretell
    embeddings: NDArray[np.float16] | None = None  # [V, DIMS] for the features; None: there are none
    concurrency: float = 0.0  # running sequences of a replica, in the mean


NO_NEWS = Briefing()
