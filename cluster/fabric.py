"""The NVLink fabric that a GPU behind switches belongs to. Links can be active while the fabric is dead.

Structures and numbers are those of nvml.h (nvmlGpuFabricInfo_t, _v2_t, _v3_t). In pynvml 12 they are wrong:
a cluster UUID of 80 bytes makes every state read as 0.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_uint8, c_uint32, sizeof
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from gammaray.cluster.driver import Driver

NOT_SUPPORTED, COMPLETED = 0, 3  # states
STATES = {1: "has not started", 2: "is still starting"}
SUMMARY_UNHEALTHY = 2
HEALTH = {  # field of the mask -> (shift, width in bits, bad values); 0: not supported
    "route recovery": (2, 2, (1,)),
    "route unhealthy": (4, 2, (1,)),
    "access timeout recovery": (6, 2, (1,)),
    "incorrect configuration": (8, 4, range(2, 16)),
    "no partition assigned": (12, 2, (2,)),
}
COMMON: list[tuple[str, Any]] = [
    ("cluster", c_uint8 * 16),
    ("status", c_uint32),
    ("clique", c_uint32),
    ("state", c_uint8),
]


class _Info1(Structure):
    _fields_ = COMMON


class _Info2(Structure):
    _fields_ = [("version", c_uint32), *COMMON, ("mask", c_uint32)]


class _Info3(Structure):
    _fields_ = [("version", c_uint32), *COMMON, ("mask", c_uint32), ("summary", c_uint8)]


FORMS: tuple[tuple[type[Structure], int, str], ...] = (  # the newest first
    (_Info3, 3, "nvmlDeviceGetGpuFabricInfoV"),
    (_Info2, 2, "nvmlDeviceGetGpuFabricInfoV"),
    (_Info1, 1, "nvmlDeviceGetGpuFabricInfo"),
)


@dataclass(frozen=True, slots=True)
class Fabric:
    clique: tuple[str, int] | None = None  # only of fabrics that reach several nodes
    fault: str | None = None


def read(driver: Driver, device: Any, what: str) -> Fabric:
    """An old driver knows nothing of fabrics: no fault."""
    info = _ask(driver, device)
    if isinstance(info, Exception):
        driver.note(what, "nvmlDeviceGetGpuFabricInfoV", info)
        return Fabric(fault=f"the state of the NVLink fabric cannot be read ({info})")
    if info is None or info.state == NOT_SUPPORTED:
        return Fabric()
    cluster = UUID(bytes=bytes(info.cluster))
    clique = (str(cluster), int(info.clique)) if cluster.int else None
    return Fabric(clique, _fault(driver, info))


def _ask(driver: Driver, device: Any) -> Any:
    """The newest form that the driver knows; None: it knows none, or has no fabric; or the error."""
    for structure, version, call in FORMS:
        info: Any = structure()
        if version > 1:
            info.version = version << 24 | sizeof(structure)
        answer = driver.answer(call, device, byref(info))
        if not isinstance(answer, Exception):
            return info
        if driver.is_(answer, "NOT_SUPPORTED"):
            return None
        if not driver.is_(answer, "FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "INVALID_ARGUMENT"):
            return answer
    return None


def _fault(driver: Driver, info: Any) -> str | None:
    """State, status and health must all be good. Less bandwidth than there should be is no fault."""
    if info.state != COMPLETED:
        words = STATES.get(info.state, f"is in state {info.state}")
        return f"the NVLink fabric {words}: look at nvidia-fabricmanager"
    dead = "the NVLink fabric is not healthy"
    if info.status != 0:
        return f"{dead}: status {info.status} ({driver.nvml.NVMLError(info.status)})"
    if getattr(info, "summary", 0) == SUMMARY_UNHEALTHY:
        return f"{dead}: so says its summary"
    for name, (shift, width, bad) in HEALTH.items():
        value = getattr(info, "mask", 0) >> shift & (1 << width) - 1
        if value in bad:
            return f"{dead}: {name} ({value})"
    return None
