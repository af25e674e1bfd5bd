"""The GPUs of this machine as its driver reports them, through nvidia-ml-py.

Whatever cannot be read becomes a note, or a fault of a GPU or a pair: links count only when the driver says
that they work. Calls and their traps: https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from gammaray.cluster import fabric, numa, nvlinks
from gammaray.cluster.driver import Driver
from gammaray.cluster.gpus import lookup, named
from gammaray.cluster.nvlinks import NvLinks
from gammaray.cluster.topology import Gpu, Join, Mig, PcieClass, Topology
from gammaray.cluster.visible import noted

LEVELS: Mapping[int, PcieClass] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


@dataclass(frozen=True, slots=True)
class _Device:
    """One GPU that answered."""

    index: int
    handle: Any
    bus: str

    @property
    def what(self) -> str:
        return f"GPU {self.index}"


def probe(node: str | None = None, numa_folder: Path = numa.NODES) -> Topology:
    """This machine, called `node` or by its host name. One without NVIDIA GPUs is empty, and notes why."""
    name = node or socket.gethostname()
    try:
        import pynvml
    except ImportError:
        return _none(name, "nvidia-ml-py is not installed: pip install 'gammaray[gpu]'")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return _none(name, "there is no NVIDIA driver: libnvidia-ml.so.1 was not found")
    except pynvml.NVMLError as error:
        return _none(name, f"the NVIDIA driver does not start: {error}")
    try:
        return _read(Driver(pynvml), name, numa_folder)
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def this_machine(gpu_name: str | None = None) -> Topology:
    """For people: notes what CUDA_VISIBLE_DEVICES leaves. `gpu_name` comes before the driver's."""
    found = noted(probe(), os.environ)
    return named(found, gpu_name) if gpu_name else found


def _none(node: str, reason: str) -> Topology:
    return Topology(node, (), notes=(f"no GPUs: {reason}",))


def _read(driver: Driver, node: str, numa_folder: Path) -> Topology:
    count = driver.ask("GPUs", "nvmlDeviceGetCount") or 0
    devices = [device for index in range(count) if (device := _device(driver, index))]
    buses = {device.bus for device in devices}
    links = {device.index: nvlinks.read(driver, device.handle, device.what, buses) for device in devices}
    gpus = {
        device.index: gpu
        for device in devices
        if (gpu := _gpu(driver, device, links[device.index], numa_folder))
    }
    joins = {
        (a.index, b.index): _join(driver, a, links[a.index], b, links[b.index])
        for a, b in combinations(devices, 2)
        if a.index in gpus and b.index in gpus
    }
    if not gpus:
        driver.notes.append("no GPUs: the driver shows none that can be used")
    return Topology(node, tuple(gpus.values()), joins, tuple(driver.notes))


def _device(driver: Driver, index: int) -> _Device | None:
    """None, with a note, for a GPU that fell off its bus."""
    what = f"GPU {index}"
    handle = driver.ask(what, "nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return None
    pci = driver.ask(what, "nvmlDeviceGetPciInfo", handle)
    return _Device(index, handle, nvlinks.bus_id(pci) if pci else "")


def _gpu(driver: Driver, device: _Device, links: NvLinks, numa_folder: Path) -> Gpu | None:
    """None, with a note, for one that nothing can run on."""
    uuid = driver.ask(device.what, "nvmlDeviceGetUUID", device.handle)
    parts = _mig(driver, device)
    if uuid is None or parts == ():
        driver.notes.append(f"{device.what} is left out: {'it has no UUID' if parts is None else NO_PARTS}")
        return None
    name = driver.ask(device.what, "nvmlDeviceGetName", device.handle) or "unknown GPU"
    memory = driver.ask(device.what, "nvmlDeviceGetMemoryInfo", device.handle)
    group = fabric.read(driver, device.handle, device.what)
    return Gpu(
        device.index,
        uuid,
        name,
        memory=int(memory.total) if memory else None,
        numa=numa.nearest(driver, device.handle, device.what, numa_folder),
        pci_bus=device.bus or None,
        nvlink_version=links.version or lookup(name).nvlink,
        clique=group.clique,
        mig=parts or (),
        fault=links.fault or (group.fault if links.shared else None),
    )


NO_PARTS = "it is split by MIG, but has no instance; create some, or switch MIG off"


def _mig(driver: Driver, device: _Device) -> tuple[Mig, ...] | None:
    """Its parts; None: MIG is off, or the GPU cannot be split."""
    mode = driver.ask_if_supported(device.what, "nvmlDeviceGetMigMode", device.handle)
    if mode is None or mode[0] != driver.constant("NVML_DEVICE_MIG_ENABLE"):
        return None
    parts = []
    most = driver.ask(device.what, "nvmlDeviceGetMaxMigDeviceCount", device.handle) or 0
    for number in range(most):
        part = driver.ask_if_supported(
            device.what, "nvmlDeviceGetMigDeviceHandleByIndex", device.handle, number
        )
        if part is None:
            continue
        uuid = driver.ask(device.what, "nvmlDeviceGetUUID", part)
        memory = driver.ask(device.what, "nvmlDeviceGetMemoryInfo", part)
        if uuid is not None and memory is not None:
            parts.append(Mig(uuid, int(memory.total)))
    return tuple(parts)


def _join(driver: Driver, a: _Device, a_links: NvLinks, b: _Device, b_links: NvLinks) -> Join:
    what = f"GPUs {a.index} and {b.index}"
    count = nvlinks.between(a_links, a.bus, b_links, b.bus)
    level = driver.ask_if_supported(what, "nvmlDeviceGetTopologyCommonAncestor", a.handle, b.handle)
    fault = nvlinks.peer_fault(driver, a.handle, b.handle, what) if count else None
    return Join(count, LEVELS.get(level) if level is not None else None, fault)
