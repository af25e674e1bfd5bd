"""What a pod that HTTP comes in through does before it stops: `python -m gammaray.cluster.leave` (preStop).

Kubernetes runs it while it takes the pod out of its Services, and only then signals Ray, which ends at once
and all streams with it. So this waits until no request is open; terminationGracePeriodSeconds is the limit.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gammaray.telemetry import names
from gammaray.telemetry.sockets import folder, gather

SETTLE_S = 5.0  # until nobody sends new requests here: proxies of nodes hear of it a moment later
POLL_S = 1.0
QUIET = 2  # looks in a row: an ingress that is late once tells nothing
SESSION = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", "session_latest")
SAMPLE = re.compile(rf"^{names.OPEN.prometheus}(?:\{{[^}}]*\}})? (\S+)$", re.MULTILINE)


def open_requests(metrics: str) -> float:
    """In progress at the ingresses of this machine, by what its processes tell Prometheus."""
    return sum(float(value) for value in SAMPLE.findall(metrics))


def leave(directory: Path, sleep: Callable[[float], None] = time.sleep) -> None:
    """Returns when no ingress with a socket in `directory` has an open request, however long it takes."""
    sleep(SETTLE_S)
    quiet = 0
    while quiet < QUIET:
        quiet = 0 if open_requests(gather(directory).decode()) else quiet + 1
        sleep(POLL_S)


if __name__ == "__main__":
    leave(folder(SESSION.resolve().name))
