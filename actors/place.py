"""Where an actor lives: a node, by its labels, and exactly these devices of it."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import ray

from gammaray.actors.labels import POOL
from gammaray.engine.threads import usable_cores
from gammaray.errors import GammarayError

VISIBLE = "CUDA_VISIBLE_DEVICES"
HEAD = {"node:__internal_head__": 0.001}  # what Ray calls the head node
NODE_ID = "ray.io/node-id"  # Ray's own label; a node that comes back has another


@dataclass(frozen=True, slots=True)
class Place:
    """Without labels: any node. Without devices the actor computes on the CPU."""

    labels: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()  # as CUDA names them; of several ranks, one for each
    memory_fraction: float | None = None  # of each device; None: whatever is free
    sharers: int = 1  # processes of ours that share the cores of the node

    def threads(self, asked: int | None) -> int:
        """To compute with on the CPU. `asked`: by the user, for every process."""
        return asked or max(1, usable_cores() // self.sharers)

    def options(self, strict: bool = False) -> dict[str, Any]:
        """Options of a Ray actor.

        `num_gpus` is 0: a lease holds the GPUs (cluster/lease.py), and Ray itself would choose among them.
        Unless `strict`, an actor without devices goes to another node while its own has no room.
        """
        options: dict[str, Any] = {"num_gpus": 0}
        if self.labels:
            options["label_selector"] = dict(self.labels)
        if self.devices:
            options["runtime_env"] = {"env_vars": {VISIBLE: ",".join(self.devices)}}
        elif self.labels and not strict:
            options["fallback_strategy"] = [{"label_selector": {}}]
        return options


def housed(pool: str | None) -> dict[str, Any]:
    """Options of a Ray actor that may be on any node of a pool; None: on the head node."""
    return {"resources": HEAD} if pool is None else {"label_selector": {POOL: pool}}


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where an actor finds itself."""

    node: str  # Ray's id
    labels: Mapping[str, str]
    devices: tuple[str, ...]


def whereabouts() -> Whereabouts:
    """Of this process. Devices are what CUDA was told."""
    context = ray.get_runtime_context()
    return Whereabouts(context.get_node_id(), cast(dict[str, str], context.get_node_labels()), _devices())


def _devices() -> tuple[str, ...]:
    return tuple(filter(None, os.environ.get(VISIBLE, "").split(",")))


def cap_memory(place: Place) -> None:
    """Keeps this process to its share of each of its GPUs. Never ran: there was no GPU."""
    if place.memory_fraction is None or not place.devices:
        return
    import torch

    for device in range(torch.cuda.device_count()):
        torch.cuda.set_per_process_memory_fraction(place.memory_fraction, device)


def occupy(devices: Iterable[str], folder: Path) -> list[int]:
    """Waits until no other replica of this node has one of these devices; has them until the files close.

    Serve starts a new replica while the old one still answers its open requests, with the memory of its GPUs.
    A process that dies has nothing any more. `folder`: where processes of this machine meet.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    node, held = ray.get_runtime_context().get_node_id(), []
    for device in sorted(devices):
        held.append(os.open(folder / f"{node} {device.replace('/', '_')}", os.O_CREAT | os.O_RDWR, 0o600))
        fcntl.flock(held[-1], fcntl.LOCK_EX)
    return held


def leave_no_core() -> None:
    """A core dump of this process would hold texts, or drafts that were rejected."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def misplaced(place: Place, found: Whereabouts) -> str | None:
    """What is wrong with where an actor is, as a sentence; None: nothing."""
    if place.devices and found.devices != place.devices:
        return f"it sees the devices {_list(found.devices)} instead of {_list(place.devices)}"
    wrong = [name for name, value in place.labels.items() if found.labels.get(name) != value]
    if place.devices and wrong:
        told = ", ".join(f"{name}={found.labels.get(name)}" for name in wrong)
        return f"it runs on node {found.node} ({told}), not on {_list(tuple(place.labels.values()))}"
    return None


def check_place(place: Place) -> None:
    """Raises GammarayError when this process is not where it should be."""
    if place.devices and (reason := misplaced(place, whereabouts())):
        raise GammarayError(f"an actor is in the wrong place: {reason}")


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
