"""HTTP requests, as metrics."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.metrics import Observation

from gammaray.telemetry import names
from gammaray.telemetry.labels import Names
from gammaray.telemetry.meters import Meters

ROUTES = 64  # told apart
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})


class IngressRecorder:
    """One a process that answers HTTP. Safe from any thread."""

    def __init__(self, meters: Meters, tenants: int, in_progress: Callable[[], int]) -> None:
        """`tenants`: how many are told apart; `in_progress`: HTTP requests now."""
        self._tenants, self._routes = Names(tenants), Names(ROUTES)
        self._histogram = meters.histogram(names.HTTP)
        meters.watch(names.OPEN, lambda: [Observation(in_progress())])

    def record(
        self, tenant: str | None, method: str, route: str | None, status: int | None, seconds: float
    ) -> None:
        """`tenant` None: nobody's. `route`: the application's template, never the path, if there is one.

        `status` None: there was no answer.
        """
        attributes = {
            names.TENANT: self._tenants.of(tenant) if tenant is not None else "",
            names.METHOD: method if method in METHODS else "_OTHER",
            names.ROUTE: self._routes.of(route) if route is not None else "",
            names.STATUS: "" if status is None else str(status),
        }
        self._histogram.record(seconds, attributes)
