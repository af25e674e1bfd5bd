"""The NVLinks of one GPU, and how many join two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from gammaray.cluster.driver import Driver

STATES = {0: "inactive", 2: "asleep", 3: "with their traffic disabled"}  # nvmlNvLinkState; 1: active
P2P = {  # nvmlGpuP2PStatus; 0: works
    1: "the chipset does not support it",
    2: "a GPU does not support it",
    3: "the PCIe topology does not support it",
    4: "a registry key of the driver disables it",
    5: "it is not supported",
}


@dataclass(frozen=True, slots=True)
class NvLinks:
    """Counts of one GPU's links; all but `down` and `unusable` are active."""

    peers: Mapping[str, int]  # bus id of a GPU of this node -> links to it
    switch: int = 0
    hidden: int = 0  # what the other end is, is not said: so in some virtual machines
    down: Mapping[str, int] | None = None  # state in words -> links
    unusable: int = 0  # without peer access, or to something that is no GPU of this node
    version: float | None = None  # the lowest

    @property
    def shared(self) -> int:
        """Links that may reach any GPU behind the same switches."""
        return self.switch + self.hidden

    @property
    def fault(self) -> str | None:
        """Set when the GPU has links, and all are down."""
        if not self.down or self.peers or self.shared or self.unusable:
            return None
        count = sum(self.down.values())
        states = ", ".join(f"{number} {state}" for state, number in sorted(self.down.items()))
        return f"links are down, or a bridge is missing: none of {count} NVLinks is active ({states})"


def bus_id(pci: Any) -> str:
    """The bus id of an nvmlPciInfo_t in one spelling: drivers write 4 or 8 digits of domain, either case."""
    text = pci.busId.decode() if isinstance(pci.busId, bytes) else str(pci.busId)
    domain, _, rest = text.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}"


def read(driver: Driver, device: Any, what: str, buses: Container[str]) -> NvLinks:
    """Asks for every link that a GPU could have. `buses`: of the node's GPUs; `what`: the GPU, for notes."""
    peers: Counter[str] = Counter()
    down: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    versions = set()
    for link in range(driver.constant("NVML_NVLINK_MAX_LINKS")):
        state = driver.ask_if_supported(what, "nvmlDeviceGetNvLinkState", device, link)
        if state is None:
            continue
        if state != 1:
            down[STATES.get(state, f"in state {state}")] += 1
            continue
        versions.add(_version(driver, device, what, link))
        end = _far_end(driver, device, what, link, buses)
        (kinds if end in ("switch", "hidden", "unusable") else peers)[end] += 1
    known = {version for version in versions if version is not None}
    version = min(known) if known and None not in versions else None
    return NvLinks(peers, kinds["switch"], kinds["hidden"], down, kinds["unusable"], version)


def _version(driver: Driver, device: Any, what: str, link: int) -> float | None:
    code = driver.ask_if_supported(what, "nvmlDeviceGetNvLinkVersion", device, link)
    return driver.nvlink_version(code)


def _far_end(driver: Driver, device: Any, what: str, link: int, buses: Container[str]) -> str:
    """'switch', 'hidden', 'unusable', or the bus id of a GPU of this node."""
    peer_access = driver.constant("NVML_NVLINK_CAP_P2P_SUPPORTED")
    if driver.ask_if_supported(what, "nvmlDeviceGetNvLinkCapability", device, link, peer_access) == 0:
        return "unusable"
    pci = driver.ask_if_supported(what, "nvmlDeviceGetNvLinkRemotePciInfo", device, link)
    if pci is not None and (bus := bus_id(pci)) in buses:
        return bus
    kind = driver.ask_if_supported(what, "nvmlDeviceGetNvLinkRemoteDeviceType", device, link)
    if kind == driver.constant("NVML_NVLINK_DEVICE_TYPE_SWITCH"):
        return "switch"
    unknown = kind is None or kind == driver.constant("NVML_NVLINK_DEVICE_TYPE_UNKNOWN")
    return "hidden" if unknown else "unusable"


def between(a: NvLinks, a_bus: str, b: NvLinks, b_bus: str) -> int:
    """Links that join two GPUs: as many as both ends have."""
    return min(a.peers.get(b_bus, 0), b.peers.get(a_bus, 0)) + min(a.shared, b.shared)


def peer_fault(driver: Driver, a: Any, b: Any, what: str) -> str | None:
    """Why the driver would let two GPUs not use the NVLinks between them; None: it does."""
    index = driver.constant("NVML_P2P_CAPS_INDEX_NVLINK")
    status = driver.ask(what, "nvmlDeviceGetP2PStatus", a, b, index)
    if status is None:
        return "the driver does not say whether the GPUs can reach each other's memory"
    return None if status == 0 else f"no peer access: {P2P.get(status, 'the driver does not say why')}"
