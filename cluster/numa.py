"""The NUMA node whose CPUs are nearest to a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gammaray.cluster.driver import Driver, bits

NODES = Path("/sys/devices/system/node")
NODE_WORDS, CPU_WORDS = 4, 64  # of 64 bits: 256 nodes, 4096 CPUs


def nearest(driver: Driver, device: Any, what: str, folder: Path = NODES) -> int | None:
    """None: unknown, or several. Only nodes with CPUs count: a GH200 lists eight that are GPU memory."""
    cpus = {node: _numbers(folder / f"node{node}" / "cpulist") for node in _numbers(folder / "has_cpu")}
    scope = driver.constant("NVML_AFFINITY_SCOPE_NODE")
    words = driver.ask_if_supported(what, "nvmlDeviceGetMemoryAffinity", device, NODE_WORDS, scope)
    near = bits(words or []) & cpus.keys()
    if not near:
        words = driver.ask_if_supported(what, "nvmlDeviceGetCpuAffinity", device, CPU_WORDS)
        near = {node for node, own in cpus.items() if own & bits(words or [])}
    return near.pop() if len(near) == 1 else None


def _numbers(path: Path) -> set[int]:
    """Of a list such as '0-3,8'; none where there is no such file."""
    try:
        parts = path.read_text().strip().split(",")
    except OSError:
        return set()
    ranges = (part.partition("-") for part in parts if part)
    return {number for low, _, high in ranges for number in range(int(low), int(high or low) + 1)}
