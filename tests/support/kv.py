"""A key-value store in memory, whose user is killed at a put."""

from __future__ import annotations

import pickle
from typing import Any


class Killed(Exception):
    """As by kill -9: nothing after it happens."""


class MemoryKV:
    """Keeps pickles, as Ray's does. Of the puts to come, number `kill_after` and all later ones fail."""

    def __init__(self, values: dict[str, bytes] | None = None, kill_after: int | None = None) -> None:
        self.values = dict(values or {})
        self.kill_after = kill_after
        self.puts = 0

    def get(self, name: str) -> Any:
        return pickle.loads(self.values[name]) if name in self.values else None

    def put(self, name: str, value: object) -> None:
        if self.kill_after is not None:
            self.kill_after -= 1
            if self.kill_after <= 0:
                raise Killed
        self.puts += 1
        if value is None:
            self.values.pop(name, None)
        else:
            self.values[name] = pickle.dumps(value)

    def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self.values if name.startswith(prefix))
