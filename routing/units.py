"""The units of one level, and the columns of them that `screen` needs."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from typing import Any, Generic, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from gammaray.routing.states import Limits, Unit
from gammaray.types import State

Id = TypeVar("Id", bound=Hashable)
CODES: dict[str, int] = {state: code for code, state in enumerate(get_args(State))}
NEW = Unit()
_COLUMNS = {
    "state": np.int8,
    "since": np.float64,
    "until": np.float64,  # inf: none
    "low": np.int8,
    "slow": np.int8,
    "clean": np.int8,
    "gamma": np.int64,  # the ceiling, or the configured depth if that is less
    "resized": np.float64,  # when the width was looked at last; inf: there is no choice
    "noted": np.bool_,
    "healthy": np.bool_,
    "floor": np.float64,
    "fr_off": np.float64,
    "most": np.int64,  # the configured depth
    "widest": np.int64,  # the configured width
    "adaptive": np.bool_,
    "used": np.bool_,  # there is such a unit, and the rules are for it
    "parent": np.intp,  # of a key its class, of a class its tenant
    "owner": np.intp,  # the tenant
    "contracted": np.bool_,  # of a class, see states.Facts
    "eager": np.bool_,  # of a class: to be switched
    "candidate": np.bool_,  # of a key
    "aside": np.bool_,  # of a key
}


class Units(Generic[Id]):
    """Places of removed units are used again."""

    def __init__(self) -> None:
        self.at: dict[Id, int] = {}
        self.ids: list[Id | None] = []
        self.all: list[Unit] = []
        self.limits: list[Limits] = []
        self._free: list[int] = []
        self._columns: dict[str, NDArray[Any]] = {name: np.zeros(0, kind) for name, kind in _COLUMNS.items()}

    def __len__(self) -> int:
        """Places."""
        return len(self.ids)

    def of(self, id: Id) -> Unit:
        """Of whom nobody has seen yet: a new one, which nothing holds back."""
        return self.all[self.at[id]] if id in self.at else NEW

    def id(self, place: int) -> Id:
        id = self.ids[place]
        assert id is not None  # the place is used
        return id

    def column(self, name: str) -> NDArray[Any]:
        """[places], a view."""
        return self._columns[name][: len(self.ids)]

    def add(self, id: Id, unit: Unit, limits: Limits, parent: int = 0, owner: int = 0) -> int:
        place = self._free.pop() if self._free else len(self.ids)
        if place == len(self.ids):
            self.ids.append(None)
            self.all.append(unit)
            self.limits.append(limits)
            self._grow()
        self.at[id], self.ids[place], self.limits[place] = place, id, limits
        columns = self._columns
        columns["used"][place], columns["parent"][place], columns["owner"][place] = True, parent, owner
        for flag in ("contracted", "eager", "candidate", "aside"):
            columns[flag][place] = False
        self.configure(place, limits)
        self.put(place, unit)
        return place

    def remove(self, place: int) -> None:
        id = self.ids[place]
        if id is not None:
            del self.at[id]
        self.ids[place] = None
        self._columns["used"][place] = False
        self._free.append(place)

    def put(self, place: int, unit: Unit) -> None:
        self.all[place] = unit
        columns, limits = self._columns, self.limits[place]
        columns["state"][place], columns["since"][place] = CODES[unit.state], unit.since
        columns["until"][place] = math.inf if unit.until is None else unit.until
        columns["low"][place], columns["slow"][place] = unit.low, unit.slow
        columns["clean"][place], columns["noted"][place] = unit.clean, unit.noted
        columns["gamma"][place] = min(unit.gamma, limits.gamma)
        columns["healthy"][place] = unit.unhealthy is None
        columns["resized"][place] = math.inf if limits.width == 1 else unit.looked

    def configure(self, place: int, limits: Limits) -> None:
        self.limits[place] = limits
        columns = self._columns
        columns["floor"][place], columns["fr_off"][place] = limits.alpha_floor, limits.fr_off
        columns["most"][place], columns["adaptive"][place] = limits.gamma, limits.adaptive
        columns["widest"][place] = limits.width

    def flag(self, place: int, name: str, value: bool) -> None:
        self._columns[name][place] = value

    def within(self, states: Collection[str]) -> NDArray[np.bool_]:
        """[places] whether a unit is in one of these states."""
        return np.isin(self.column("state"), [CODES[state] for state in states])

    def _grow(self) -> None:
        for name, column in self._columns.items():
            if len(column) < len(self.ids):
                more = np.zeros(len(self.ids) // 4 + 64, column.dtype)
                self._columns[name] = np.concatenate((column, more))
