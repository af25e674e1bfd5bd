"""The controller as an actor, and how it is hired and dismissed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray

from gammaray.actors.crew import NAMESPACE
from gammaray.actors.desk import KEPT, Desk, Mandate
from gammaray.actors.front import Front
from gammaray.actors.journal import AuditLog, Journal, RayKV
from gammaray.actors.line import NAME
from gammaray.actors.metrics import session_folder
from gammaray.actors.place import housed
from gammaray.routing.bulletin import Answer, Bulletin, Known, Origin
from gammaray.routing.window import Window
from gammaray.telemetry.control import ControlRecorder
from gammaray.telemetry.meters import open_meters

logger = logging.getLogger(__name__)

KV = RayKV("gammaray controller")
MANDATE = "mandate"


class ControllerActor(Front):
    """A thread ticks; calls are answered in between. What it decided is safe before anybody hears of it."""

    def __init__(self) -> None:
        mandate: Mandate = KV.get(MANDATE)
        settings = mandate.config.controller
        log = AuditLog(settings.audit_log) if settings.audit_log else None
        super().__init__(Desk(mandate, Journal(KV, log), time.time))
        self._interval_s = settings.interval_s
        self._tenants = mandate.config.telemetry.tenants
        meters = open_meters(mandate.config, "controller", session_folder())
        self._recorder = ControlRecorder(meters, self._tenants)
        threading.Thread(target=self._ticks, name="ticks", daemon=True).start()

    def _ticks(self) -> None:
        while True:
            began = time.monotonic()
            self._desk.tick_at = time.time() + self._interval_s
            try:
                self._desk.tick()
                self._recorder.record(self._desk.overview(self._tenants), self._desk.take_decisions())
                self._desk.learn()
            except Exception:  # of Ray's, for a while
                logger.exception("a tick of the controller failed")
            time.sleep(max(0.0, self._interval_s - (time.monotonic() - began)))

    def tell(self, origin: Origin, windows: tuple[Window, ...]) -> Answer:
        return self._desk.tell(origin, windows)

    def bulletin(self, known: Known) -> Bulletin | None:
        return self._desk.bulletin(known)

    def relocate(self, placement: Mapping[str, Any]) -> None:
        """Parts of the application have moved, which changes no decision."""
        self._desk.mandate = replace(self._desk.mandate, placement=placement)
        KV.put(MANDATE, self._desk.mandate)


def hire(mandate: Mandate, pool: str | None = None) -> Any:
    """The handle of a new controller. Usage of the days before stays, all else begins anew.

    Without a pool it is on the head node, as its audit log is where `gammaray serve` runs.
    """
    dismiss()
    KV.put(MANDATE, mandate)
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(ControllerActor)
    options: dict[str, Any] = {"name": NAME, "namespace": NAMESPACE, "lifetime": "detached"}
    return actor.options(**options, **housed(pool)).remote()


def dismiss() -> None:
    """Ends the controller, if there is one, and forgets what it decided."""
    with suppress(ValueError):
        ray.kill(ray.get_actor(NAME, NAMESPACE))
    for name in KV.names(""):
        if not name.startswith(KEPT):
            KV.put(name, None)
