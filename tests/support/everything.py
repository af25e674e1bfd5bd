"""One of each of our processes, which have all seen something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from gammaray.telemetry.control import ControlRecorder
from gammaray.telemetry.ingress import IngressRecorder
from gammaray.telemetry.labels import Labels
from gammaray.telemetry.meters import Meters
from gammaray.telemetry.recorder import Recorder
from gammaray.telemetry.sockets import gather
from support.reports import ENDED, counts, key, overview, step, tenant


@dataclass(frozen=True)
class Decision:
    rule: str = "fallback_rate"
    level: str = "tenant"


class Everything:
    """A replica, the ingress and the controller of one node. `live`: one more round of work."""

    def __init__(self, directory: Path) -> None:
        self.meters = [Meters(name) for name in ("target-0", "ingress", "controller")]
        for meters in self.meters:
            meters.serve(directory)
        replica, ingress, controller = self.meters
        self._recorder = Recorder(replica, Labels(200, {"chat": "eu"}), "tiny")
        self._ingress = IngressRecorder(ingress, 200, lambda: 3)
        self._control = ControlRecorder(controller, 200)

    def live(self, now: float) -> None:
        """`now`: of the controller, in seconds since 1970."""
        fallen = replace(ENDED, fallback="kv")
        warmup = replace(ENDED, request_class="warmup", state="warmup")
        self._recorder.record(
            step(counts(), counts(("chat", "warmup", "lookup")), finished=(ENDED, fallen, warmup))
        )
        self._ingress.record("chat", "POST", "/v1/chat/completions", 200, 0.3)
        tenants = [tenant("chat", key(), key("small", bimodal=True), key(None))]
        self._control.record(overview(tenants, time=now), [Decision()])

    def close(self) -> None:
        for meters in self.meters:
            meters.close()


@contextmanager
def everything() -> Iterator[tuple[Everything, Path]]:
    with TemporaryDirectory(prefix="gr-") as folder:
        processes = Everything(Path(folder) / "m")
        try:
            yield processes, Path(folder) / "m"
        finally:
            processes.close()


def told() -> bytes:
    with everything() as (processes, directory):
        processes.live(1_700_000_000.0)
        return gather(directory)
