"""The real controller without Ray, as the operator's routes ask it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gammaray.actors.desk import Desk, Mandate
from gammaray.actors.front import Front
from gammaray.actors.journal import Journal
from gammaray.config import Config
from gammaray.errors import Overloaded
from support.kv import MemoryKV


class LocalOperations:
    """`gone`: as if the controller did not answer."""

    def __init__(self, config: Config, clock: Callable[[], float], kv: MemoryKV | None = None) -> None:
        self.desk = Desk(Mandate(config), Journal(kv or MemoryKV()), clock)
        self.front = Front(self.desk)
        self.gone = False

    def __getattr__(self, name: str) -> Any:
        async def ask(*arguments: Any) -> Any:
            if self.gone:
                raise Overloaded("the controller does not answer", code="no_controller")
            return getattr(self.front, name)(*arguments)

        return ask
