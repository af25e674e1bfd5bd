"""What changes when a layout is planned anew because a node was lost: pure decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from gammaray.actors.draft import Post
from gammaray.actors.target import Slot
from gammaray.cluster.app import actor_options, name_of
from gammaray.cluster.layout import Layout
from gammaray.cluster.nodes import Node
from gammaray.errors import GammarayError

T = TypeVar("T")
Json = dict[str, Any]


def homes(layout: Layout, nodes: Iterable[Node]) -> dict[str, str]:
    """Name and Ray's id of the nodes that something of the layout is on."""
    slots = [place for slot in layout.slots for place in (slot.place, *slot.fellows)]
    used = [dict(place.labels) for place in [*slots, *(post.place for post in layout.posts)]]
    return {node.name: node.id for node in nodes if dict(node.labels) in used}


def renumbered(before: Layout, after: Layout) -> Layout:
    """`after`, where what has not moved keeps the number that it had: so it need not start again.

    Raises GammarayError when the running ingress and replicas could not go on with it.
    """
    numbers = _kept({slot.number: _anyone(slot) for slot in before.slots}, [*map(_anyone, after.slots)])
    of = dict(zip((slot.number for slot in after.slots), numbers, strict=True))
    slots = sorted((replace(slot, number=of[slot.number]) for slot in after.slots), key=lambda s: s.number)
    _check(before.slots, slots)
    near = [replace(post, near=None if post.near is None else of[post.near]) for post in after.posts]
    pools = dict.fromkeys(post.pool for post in near)
    posts = [post for pool in pools for post in _staffed(pool, before.posts, near)]
    seats = [_seat(seat, of) for seat in after.outline["seats"]]
    return Layout(tuple(slots), tuple(posts), after.gpus, {**after.outline, "seats": seats})


def _anyone(slot: Slot) -> Slot:
    return replace(slot, number=0)


def _kept(before: Mapping[int, T], after: Sequence[T]) -> list[int]:
    """A number for each of `after`: that of its equal in `before`, else the lowest that is left."""
    left, found = dict(before), dict[int, int]()
    for i, one in enumerate(after):
        if equal := [number for number, other in left.items() if other == one]:
            found[i] = equal[0]
            del left[equal[0]]
    used = set(found.values())
    fresh = (number for number in count() if number not in used)
    return [found[i] if i in found else next(fresh) for i in range(len(after))]


def _check(before: Iterable[Slot], after: Iterable[Slot]) -> None:
    for old, new in zip(before, after, strict=True):
        if old.pools != new.pools:
            raise GammarayError("other drafters would be outside of the target's process")
        if old.fellows != new.fellows and old.place == new.place:
            raise GammarayError(f"replica {new.number} would keep its first GPU and change others")


def _staffed(pool: tuple[str, str], before: Iterable[Post], after: Iterable[Post]) -> list[Post]:
    posts = [post for post in after if post.pool == pool]
    known = {post.worker: replace(post, worker=0) for post in before if post.pool == pool}
    numbers = _kept(known, [replace(post, worker=0) for post in posts])
    return [replace(post, worker=number) for post, number in zip(posts, numbers, strict=True)]


def _seat(seat: Json, of: Mapping[int, int]) -> Json:
    role, _, number = seat["what"].partition(" ")
    return {**seat, "what": f"{role} {of[int(number)]}"} if seat["tenant"] is None else seat


def overrides(built: Layout, now: Layout) -> list[Json]:
    """What to tell Serve of deployments whose replica is elsewhere than when the application was built."""
    return [
        {"name": name_of(slot, now), "ray_actor_options": actor_options(slot)}
        for old, slot in zip(built.slots, now.slots, strict=True)
        if old.place != slot.place
    ]


def disturbed(before: Layout, after: Layout, lost: Iterable[str]) -> set[str]:
    """Nodes whose GPUs are to be leased anew or given back."""
    names = {*before.gpus, *after.gpus}
    return {name for name in names if before.gpus.get(name) != after.gpus.get(name)} | (names & {*lost})
