"""Holds exactly the GPUs of a plan in Ray's books, so that no other job of the cluster is given one of them.

Ray hands out GPUs of its own choice. So GPUs of a node are reserved one by one, a tiny task in each
reservation tells which one it is, and those that the plan does not use go back. Actors then take no GPU from
Ray: they name their devices themselves (actors/place.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gammaray.cluster.nodes import Node
from gammaray.errors import GammarayError

PREFIX = "gammaray gpu "  # of the names of our reservations
PATIENCE_S = 15.0  # for one more GPU of a node; a worker process starts in 1 to 5 s


@contextmanager
def leased(
    wanted: Mapping[str, Iterable[frozenset[str]]], nodes: Iterable[Node], patience_s: float = PATIENCE_S
) -> Iterator[dict[str, list[str]]]:
    """Holds GPUs by the name of their node; yields Ray's names of them, in the order asked for.

    A GPU is the set of names that Ray may use for it: its index, its UUID. Raises GammarayError when
    somebody else holds one. What an earlier run of ours left behind is taken back first.
    """
    release()
    try:
        yield lease(wanted, nodes, patience_s)
    finally:
        release(wanted)


def lease(
    wanted: Mapping[str, Iterable[frozenset[str]]], nodes: Iterable[Node], patience_s: float = PATIENCE_S
) -> dict[str, list[str]]:
    """Holds them until `release`, also without this process. Raises as `leased` does, and then holds none."""
    known = {node.name: node for node in nodes}
    held: list[PlacementGroup] = []
    try:
        return {name: _lease(known[name], list(gpus), held, patience_s) for name, gpus in wanted.items()}
    except BaseException:
        for group in held:
            remove_placement_group(group)
        raise


def _lease(
    node: Node, wanted: list[frozenset[str]], held: list[PlacementGroup], patience_s: float
) -> list[str]:
    """Adds what it holds to `held`."""
    found: dict[str, PlacementGroup] = {}
    try:
        while missing := [names for names in wanted if not names & found.keys()]:
            count = min(len(missing), node.gpus - len(found))
            more = _reserve(node, count, patience_s)
            found |= more
            if len(more) < count or not count:
                raise _taken(node, [names for names in missing if not names & found.keys()])
    finally:
        ours = {gpu for gpu in found if any(gpu in names for names in wanted)}
        held += [found[gpu] for gpu in ours]
        for gpu in found.keys() - ours:
            remove_placement_group(found[gpu])
    return [next(gpu for gpu in found if gpu in names) for names in wanted]


def _reserve(node: Node, count: int, patience_s: float) -> dict[str, PlacementGroup]:
    """So many more GPUs of the node, whichever Ray gives, by Ray's name; fewer when there are no more."""
    selector = [dict(node.labels)]
    stamp = time.time_ns()
    groups = [
        placement_group(
            [{"GPU": 1}],
            name=f"{PREFIX}{node.name} {stamp} {i}",
            lifetime="detached",
            bundle_label_selector=selector,
        )
        for i in range(count)
    ]
    asked = {_which(group): group for group in groups}
    done, late = ray.wait([*asked], num_returns=count, timeout=patience_s) if asked else ([], [])
    for call in late:
        ray.cancel(call, force=True)
        remove_placement_group(asked[call])
    return {ray.get(call): asked[call] for call in done}


def _which(group: PlacementGroup) -> ray.ObjectRef[str]:
    # Without `max_calls` Ray ends a worker after one task that has a GPU, and each start takes a second.
    task: Any = ray.remote(num_cpus=0, num_gpus=0.01, max_calls=0)(_gpu_id)
    call: ray.ObjectRef[str] = task.options(
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0)
    ).remote()
    return call


def _gpu_id() -> str:
    return str(ray.get_gpu_ids()[0])


def _taken(node: Node, missing: list[frozenset[str]]) -> GammarayError:
    gpus = ", ".join(" or ".join(sorted(names)) for names in missing)
    return GammarayError(
        f"GPU {gpus} of node {node.name} is held by another job of this Ray cluster: stop that job, or take "
        "the GPU out of the topology and plan again"
    )


def release(nodes: Iterable[str] | None = None) -> None:
    """Gives back what is held of nodes with these names; None: of all, also by a run that was killed."""
    from ray.util.placement_group import placement_group_table

    ours = (PREFIX,) if nodes is None else tuple(f"{PREFIX}{name} " for name in nodes)
    for group in placement_group_table().values():
        if group["name"].startswith(ours) and group["state"] != "REMOVED":
            with suppress(Exception):  # gone meanwhile
                remove_placement_group(ray.util.get_placement_group(group["name"]))
