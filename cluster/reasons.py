"""Why a process is where it is, in words."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

from gammaray.cluster.devices import Device, Hardware
from gammaray.cluster.plans import Demand, DraftDemand
from gammaray.cluster.state import Draft, Spot, State
from gammaray.cluster.topology import count, why_not
from gammaray.drafter_config import WEIGHTLESS

SOCKET_MS = 1  # added to a round by a socket between processes, measured on two CPU cores
TRAFFIC = (
    "a split drafter sends token ids and truncated q: some hundred bytes a round, so that latency counts and "
    "NVLink makes no difference. NVLink matters for what is large"
)
LIGHT = "light: proposes without a model"
INSIDE = {  # by method, of those that are in the target's process wherever it is
    "layer_exit": "runs the target's own first layers over the target's KV",
    "composite": "merges what others of this process draft",
}
HEAD = "continues the target's hidden states"
GROWS = "room for a worker when the pool grows:"


class Reasons:
    """Of a finished placement."""

    def __init__(self, hw: Hardware, demand: Demand, state: State) -> None:
        self.hw, self.demand, self.state = hw, demand, state
        self._obstacles = cache(self._why_not)

    def target(self, replica: int) -> str:
        site = self.state.sites[replica]
        island = next(island for island in self.hw.islands if island >> site[0] & 1).bit_count()
        best = f"the best fit: an island of {island} GPUs" if island > 1 else "the best fit"
        first = self.hw.devices[site[0]]
        if len(site) > 1:
            return f"{gpus([self.hw.devices[i] for i in site])} are linked all to all, {best}"
        return (
            f"{name(first)}, {best}" if island > 1 else f"{name(first)}, {best}: it has no NVLink that counts"
        )

    def draft(self, draft: Draft, spot: Spot) -> str:
        lead = self.hw.devices[self.state.sites[draft.replica][0]]
        device = self.hw.devices[spot.device]
        if spot.shared:
            return f"the process of replica {draft.replica} holds this drafter already, one copy does"
        if spot.via == "same-process":
            if draft.demand.method != "model":
                return inside(draft.demand)
            if draft.demand.wish == "same-gpu":
                return "as `placement: same-gpu` asks: in the target's process"
            return f"in the target's process: {self.no_split(draft)}"
        if spot.via == "nvlink":
            return f"{self._link(lead, device)}{self._company(draft, spot)}"
        forced = f"{self._forced(lead, device, spot)}{self._company(draft, spot)}"
        return f"{forced}. {self._cost(draft.demand, spot)}"

    def no_split(self, draft: Draft) -> str:
        """Why no other GPU can take a draft."""
        i = self.state.sites[draft.replica][0]
        lead, near = self.hw.devices[i], self.hw.near[i]
        if near:
            targets = near & self.state.taken
            return (
                f"no GPU linked directly to {name(lead)} can take it: {targets.bit_count()} with a target, "
                f"{(near & ~targets).bit_count()} with less than {size(draft.demand.need)} left"
            )
        if lead.part:
            return f"GPU {lead.index} is split by MIG, whose parts have no peer access"
        if len(self.hw.topology(lead.node).gpus) == 1:
            return f"node {lead.node} has no other GPU"
        asked = f"NVLink {self.demand.min_nvlink_version:g} or newer"
        return f"no GPU is linked directly to {name(lead)} by {asked} ({self._obstacles(lead)})"

    def _why_not(self, lead: Device) -> str:
        """What is between it and each other GPU of its node; those with one reason together."""
        topology, version = self.hw.topology(lead.node), self.demand.min_nvlink_version
        found: defaultdict[str, list[int]] = defaultdict(list)
        for other in sorted(gpu.index for gpu in topology.gpus if gpu.index != lead.index):
            found[why_not(topology, lead.index, other, version)].append(other)
        return "; ".join(f"{_indices(members)}: {reason}" for reason, members in found.items())

    def _link(self, lead: Device, device: Device) -> str:
        if lead.node != device.node:
            fabric = f"{name(lead)} of node {lead.node}"
            return f"{name(device)} of node {device.node} is in the NVLink fabric of {fabric}"
        topology = self.hw.topology(lead.node)
        links = count(topology.join(lead.index, device.index).nvlinks, "NVLink")
        versions = [topology.gpu(gpu.index).nvlink_version for gpu in (lead, device)]
        version = min(version for version in versions if version is not None)
        return f"{name(device)} is linked directly to {name(lead)} by {links} of version {version:g}"

    def _company(self, draft: Draft, spot: Spot) -> str:
        others = [
            f"{other.demand.tenant}/{other.demand.drafter} worker {other.worker}"
            for other, at in self.state.spots
            if at.device == spot.device and at.via != "same-process" and other != draft
        ]
        return f"; shares it with {', '.join(others)}, as GPUs are short" if others else ""

    def _forced(self, lead: Device, device: Device, spot: Spot) -> str:
        asked = "as `placement: split` asks"
        if spot.via == "same-gpu":
            return f"{asked}: a process of its own; {name(lead)}, as no other here has room; they take turns"
        if spot.via == "network":
            return f"{asked}: on node {device.node}, over the network, as node {lead.node} has no room"
        if lead.index == device.index:
            return f"{asked}: on another part of GPU {lead.index}"
        topology, version = self.hw.topology(lead.node), self.demand.min_nvlink_version
        return f"{asked}, without NVLink: {why_not(topology, lead.index, device.index, version)}"

    def _cost(self, draft: DraftDemand, spot: Spot) -> str:
        """Measured for a socket on one machine; a network adds its own latency."""
        carrier = "the network" if spot.via == "network" else "PCIe"
        beyond = " and the network's latency" if spot.via == "network" else ""
        cost = (
            f"Costs about {SOCKET_MS} ms{beyond} a round: {draft.round_bytes} bytes a request, latency-bound"
        )
        feature = self.demand.target.feature_bytes
        if spot.via == "same-gpu" or not feature:
            return cost
        states = f"hidden states for a head drafter, {feature} bytes a token"
        return f"{cost}; {states}, would move at the speed of {carrier}"

    def traffic(self) -> str:
        """What NVLink is for, with this target's sizes."""
        target = self.demand.target
        feature = f" ({target.feature_bytes} bytes a token)" if target.feature_bytes else ""
        full = f" ({target.q_bytes} bytes a position)" if target.q_bytes else ""
        return f"{TRAFFIC}: hidden states for head drafters{feature}, KV, q over the whole vocabulary{full}"


def inside(draft: DraftDemand) -> str:
    """Why a drafter that is no model is in the target's process."""
    if draft.method in WEIGHTLESS:
        return f"{LIGHT}, on the CPU of the target's process"
    return f"{INSIDE.get(draft.method, HEAD)}: in the target's process"


def name(device: Device) -> str:
    return f"part {device.uuid} of GPU {device.index}" if device.part else f"GPU {device.index}"


def gpus(devices: list[Device]) -> str:
    return _indices([device.index for device in devices])


def size(amount: float) -> str:
    return f"{amount / 1e9:.1f} GB"


def _indices(found: list[int]) -> str:
    listed = " ".join(str(index) for index in found)
    return f"GPU {listed}" if len(found) == 1 else f"GPUs {listed}"
