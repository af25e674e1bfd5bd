"""A torch profiler over the next steps of an engine, on demand."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

from torch.profiler import profile

from gammaray.errors import Overloaded


@dataclass(slots=True)
class _Order:
    left: int  # steps; 0: it ends with the one that runs, or the next
    profiler: profile | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Capture:
    """`order` from any thread; `before` and `after` around each step, on the engine's. One at a time.

    Kernels and times only: neither shapes nor values are recorded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._order: _Order | None = None

    def order(self, steps: int, timeout_s: float) -> str:
        """The file of a Chrome trace over so many steps. Raises Overloaded when they did not come in time."""
        order = _Order(steps)
        with self._lock:
            if self._order is not None:
                raise Overloaded("a profile is being captured already; try again when it is done")
            self._order = order
        if not order.done.wait(timeout_s):
            self._give_up(order)
            text = f"the engine did not make {steps} steps in {timeout_s:g} s; send it requests meanwhile"
            raise Overloaded(text)
        file = Path(tempfile.mkdtemp(prefix="gammaray-profile-")) / "trace.json"  # its owner's only
        assert order.profiler is not None
        order.profiler.export_chrome_trace(str(file))
        return str(file)

    def _give_up(self, order: _Order) -> None:
        """What has begun is stopped where it runs, on the engine's thread."""
        with self._lock:
            order.left = 0
            if order.profiler is None:
                self._order = None

    def before(self) -> None:
        with self._lock:
            if (order := self._order) is not None and order.profiler is None:
                order.profiler = profile()
                order.profiler.start()

    def after(self) -> None:
        with self._lock:
            if (order := self._order) is None or order.profiler is None:
                return
            order.left -= 1
            if order.left <= 0:
                order.profiler.stop()
                self._order = None
                order.done.set()
