"""CUDA_VISIBLE_DEVICES, which NVML ignores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gammaray.cluster.topology import Gpu, Topology

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible(topology: Topology, environ: Mapping[str, str]) -> Topology:
    """What a process with this environment may use, in the order of CUDA's ordinals.

    Entries are indices, UUIDs or beginnings of one (GPU-..., MIG-...). As in CUDA an entry that fits nothing
    hides itself and all behind it, so '' and '-1' leave nothing. An index counts in the driver's order: CUDA
    may number unlike GPUs otherwise, unless CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    if VARIABLE not in environ:
        return topology
    chosen: dict[int, Gpu] = {}
    notes = list(topology.notes)
    entries = [entry.strip() for entry in environ[VARIABLE].split(",")]
    for entry in entries:
        gpu = _match(topology, entry)
        if gpu is None:
            if entry not in ("", "-1"):
                notes.append(
                    f"{VARIABLE}: {entry!r} fits no GPU here, or several; it and the rest are hidden"
                )
            break
        chosen[gpu.index] = _merge(chosen.get(gpu.index), gpu)
    pairs = {pair: join for pair, join in topology.joins.items() if {*pair} <= chosen.keys()}
    return replace(topology, gpus=tuple(chosen.values()), joins=pairs, notes=tuple(notes))


def _match(topology: Topology, entry: str) -> Gpu | None:
    """The one GPU that `entry` means; with one part when it means that."""
    if entry.isdecimal():
        fits = [gpu for gpu in topology.gpus if str(gpu.index) == (entry.lstrip("0") or "0")]
    elif entry.startswith("GPU-"):
        fits = [gpu for gpu in topology.gpus if gpu.uuid.startswith(entry)]
    elif entry.startswith("MIG-"):
        parts = ((gpu, part) for gpu in topology.gpus for part in gpu.mig)
        fits = [replace(gpu, mig=(part,)) for gpu, part in parts if part.uuid.startswith(entry)]
    else:
        fits = []
    return fits[0] if len(fits) == 1 else None


def _merge(seen: Gpu | None, gpu: Gpu) -> Gpu:
    """Two parts of one GPU are one GPU with two parts."""
    if seen is None:
        return gpu
    return replace(gpu, mig=tuple(dict.fromkeys((*seen.mig, *gpu.mig))))


def noted(topology: Topology, environ: Mapping[str, str]) -> Topology:
    """All of it, with a note of what this process may use when that is less."""
    if VARIABLE not in environ:
        return topology
    left = visible(topology, environ)
    indices = ", ".join(str(gpu.index) for gpu in left.gpus) or "none"
    return replace(topology, notes=(*left.notes, f"{VARIABLE} leaves this process of these GPUs: {indices}"))
