"""Limited discrepancy search in order of preference (Harvey and Ginsberg, IJCAI 1995; Korf, AAAI 1996).

An early choice may be the wrong one, and a depth-first search would change only late ones before its steps
are spent. So departures from the preferred choices are counted: first come all ways with one, then with two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar


class Counted(Protocol):
    @property
    def placed(self) -> int: ...


Item = TypeVar("Item")
State = TypeVar("State", bound=Counted)


def best(
    items: Sequence[Item],
    start: State,
    options: Callable[[Item, State], Iterator[State]],
    steps: int,
) -> State:
    """The way through `options` that places every item with the fewest departures from the preferred choices;
    if there is none, the first of those that place the most.

    `options` yields what may follow a state, the preferred first, and must always yield something. After
    `steps` beyond the preferred way the best so far is taken.
    """
    found = start
    for item in items:
        found = next(options(item, found))
    for departures in range(1, len(items) + 1):
        path = [iter([(start, departures)])]
        while path and steps and found.placed < len(items):
            state, more = next(path[-1], (None, 0))
            if state is None:
                path.pop()
                continue
            steps -= 1
            left = len(items) + 1 - len(path)
            if more > left or state.placed + left <= found.placed:
                continue  # not even the rest could make it better
            if left:
                path.append(_choices(options(items[-left], state), more))
            else:
                found = state
    return found


def _choices(following: Iterator[State], departures: int) -> Iterator[tuple[State, int]]:
    """Each state with the departures that are left after it; early departures are tried before late ones."""
    preferred = next(following)
    if departures:
        yield from ((state, departures - 1) for state in following)
    yield preferred, departures
