"""A drafter served on the draft link, in a thread of this process."""

from __future__ import annotations

import secrets
import threading
import time

import ray

from gammaray.actors.draft import Load
from gammaray.actors.link.channel import Address, listen
from gammaray.actors.link.serve import serve
from gammaray.actors.link.server import DraftServer
from gammaray.engine.drafters.base import Drafter
from gammaray.errors import EngineFailure

SECRET_BYTES = 32


class Served:
    """Listens where the nodes of the Ray cluster reach each other; only replicas know the secret."""

    def __init__(self, name: str, drafter: Drafter, vocab_size: int) -> None:
        listener = listen((ray.util.get_node_ip_address(), 0))
        self.address = Address(listener.getsockname()[:2], secrets.token_bytes(SECRET_BYTES))
        self._server = DraftServer(drafter, vocab_size, name, self.address.secret)
        arguments = (listener, self._server, lambda: False, time.perf_counter)
        self._thread = threading.Thread(target=serve, args=arguments, daemon=True)
        self._thread.start()
        self._asked, self._busy_s = time.perf_counter(), 0.0

    def load(self) -> Load:
        """`busy` is since the last time that this was asked."""
        stats, now = self._server.stats, time.perf_counter()
        busy = (stats.busy_s - self._busy_s) / max(now - self._asked, 1e-3)
        self._asked, self._busy_s = now, stats.busy_s
        return Load(stats.sequences, stats.queued, min(1.0, busy))

    def check(self) -> None:
        if not self._thread.is_alive():
            raise EngineFailure("the draft link's thread has ended")
