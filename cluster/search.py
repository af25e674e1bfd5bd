"""Depth-first search in order of preference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

STEPS = 1000  # to go on after a first answer that leaves something out; a step takes up to 2 ms


class Counted(Protocol):
    @property
    def placed(self) -> int: ...


Item = TypeVar("Item")
State = TypeVar("State", bound=Counted)


def best(
    items: Sequence[Item],
    start: State,
    options: Callable[[Item, State], Iterator[State]],
    steps: int = STEPS,
) -> State:
    """The first way through `options` that places every item; else the first of those that place the most.

    `options` yields what may follow a state, the preferred first, and must always yield something. After
    `steps` more the best so far is taken.
    """
    if not items:
        return start
    found: State | None = None
    path = [options(items[0], start)]
    while path and (found is None or steps > 0):
        state = next(path[-1], None)
        if state is None:
            path.pop()
            continue
        steps -= found is not None
        left = len(items) - len(path)
        if found is not None and state.placed + left <= found.placed:
            continue  # not even the rest could make it better
        if left:
            path.append(options(items[len(path)], state))
            continue
        found = state
        if state.placed == len(items):
            break
    assert found is not None
    return found
