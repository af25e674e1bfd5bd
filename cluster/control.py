"""The controller of a running application, from before its first request to after its last."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import RayError

from gammaray.actors.controller import dismiss, hire
from gammaray.actors.desk import Mandate
from gammaray.cluster.layout import Layout
from gammaray.config import Config
from gammaray.errors import ConfigError, GammarayError

START_S = 60.0


@contextmanager
def controlled(config: Config, layout: Layout) -> Iterator[None]:
    """Decides until the end. Raises ConfigError when its audit log cannot be written."""
    dismiss()  # of an application that was killed, also when this one has no controller
    if not config.controller.enabled:
        yield
        return
    try:
        start(config, layout)
        yield
    finally:
        dismiss()


def start(config: Config, layout: Layout, pool: str | None = None) -> None:
    """In a pool, or on the head node. Raises ConfigError when its audit log cannot be written."""
    mandate = Mandate(config, apart(config, layout), layout.outline)
    controller = hire(mandate, pool)
    try:
        ray.get(controller.policies.remote(), timeout=START_S)
    except RayError as error:
        reasons = re.findall(r"^(?:\w+Error): (.+)$", str(error), re.MULTILINE)
        if mandate.config.controller.audit_log and reasons:
            raise ConfigError(f"controller.audit_log: {reasons[-1]}") from None
        raise GammarayError(f"the controller did not start: {(reasons or [error])[-1]}") from None


def apart(config: Config, layout: Layout) -> frozenset[str]:
    """Drafters that no replica has in its own process: only tenants with draft workers reach them."""
    pools = {pool for slot in layout.slots for pool in slot.pools}
    owners = {drafter: {tenant for tenant, name in pools if name == drafter} for _, drafter in pools}
    return frozenset(name for name, its in owners.items() if not config.drafting_with(name) - its)
