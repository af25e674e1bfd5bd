"""What could not be placed: why, and what would help."""

from __future__ import annotations

from gammaray.cluster.devices import USABLE, Hardware, bits, cliques, mask
from gammaray.cluster.plans import Demand, DraftDemand, TargetDemand, Unplaced
from gammaray.cluster.reasons import Reasons, name, size
from gammaray.cluster.state import Draft
from gammaray.cluster.topology import count


def replica(hw: Hardware, demand: Demand, number: int, placed: int) -> Unplaced:
    """A replica of the target, of which `placed` others have a place."""
    target, what = demand.target, f"target {demand.target.model} replica {number}"
    group = target.tensor_parallel
    if not any(device.room >= target.need for device in hw.devices):
        return Unplaced(what, _too_large(hw, demand), _memory(demand))
    if not _found(hw, target.need, group):
        reason = f"no {group} GPUs that hold a share of {size(target.need)} each are linked all to all"
        needs = f"a node with {group} such GPUs linked all to all by NVLink"
        return Unplaced(what, reason, f"{needs}{_fewer(hw, target)}{_unknown(hw)}")
    whole = "GPU" if group == 1 else f"group of {group} GPUs linked all to all"
    reason = f"every {whole} that holds {size(target.need)} is taken, by {count(placed, 'replica')}"
    return Unplaced(what, reason, f"one more {whole}, or target.replicas: {placed}")


def _found(hw: Hardware, need: float, group: int) -> bool:
    capable = mask(i for i, device in enumerate(hw.devices) if device.room >= need)
    return any(cliques(hw, capable, group))


def _fewer(hw: Hardware, target: TargetDemand) -> str:
    """A smaller group that could hold the target here. A divisor divides the model's heads, too."""
    group = target.tensor_parallel
    smaller = [k for k in range(1, group) if group % k == 0 and _found(hw, target.need * group / k, k)]
    return f", or target.tensor_parallel: {smaller[-1]}" if smaller else ""


def draft(reasons: Reasons, missing: Draft) -> Unplaced:
    """A worker whose target has a place."""
    hw, demand, state = reasons.hw, reasons.demand, reasons.state
    wanted, lead = missing.demand, state.sites[missing.replica][0]
    asked = f"NVLink {demand.min_nvlink_version:g} or newer"
    host = name(hw.devices[lead])
    reason = (
        f"it needs {size(wanted.need)} (weights {size(wanted.weights)}, KV {size(wanted.kv)}); {host} "
        f"of node {hw.devices[lead].node} has {size(state.room[lead])} left beside the target"
    )
    smaller = "a smaller drafter, or a lower target.max_model_len"
    if wanted.wish == "same-gpu":
        whole = size((hw.devices[lead].room - state.room[lead] + wanted.need) / USABLE)
        larger = f"a GPU of at least {whole} for all of them"
        return Unplaced(_worker(wanted, missing.worker), reason, f"{larger}, {smaller}")
    if wanted.wish == "split":
        room = max((state.room[i] for i in bits(~state.taken & (1 << len(state.room)) - 1)), default=0.0)
        reason = f"{reason}, and no other GPU more than {size(room)}"
        another = f"one more GPU, of at least {size(wanted.need / USABLE)}"
        return Unplaced(_worker(wanted, missing.worker), reason, f"{another}, {smaller}")
    reason = f"{reason}, and {reasons.no_split(missing)}"
    link = f"a GPU with {size(wanted.need)} free that is linked directly to {host} by {asked}"
    return Unplaced(_worker(wanted, missing.worker), reason, f"{link}, {smaller}, or `placement: split`")


def orphan(wanted: DraftDemand, worker: int) -> Unplaced:
    """A worker without any target."""
    return Unplaced(_worker(wanted, worker), "no replica of the target has a place", "a place for the target")


def _worker(wanted: DraftDemand, worker: int) -> str:
    return f"draft {wanted.drafter} of tenant {wanted.tenant} worker {worker}"


def _too_large(hw: Hardware, demand: Demand) -> str:
    target = demand.target
    most = max(device.room for device in hw.devices)
    part = f"a share of one GPU of {target.tensor_parallel}" if target.tensor_parallel > 1 else "it"
    return (
        f"{part} needs {size(target.need)} (weights {size(target.weights)}, KV {size(target.kv)} for one "
        f"sequence of full length), the largest device has {size(most)} ({USABLE:g} of its memory)"
    )


def _memory(demand: Demand) -> str:
    """Bytes of a device that would do, and the keys that lower the need."""
    least = size(demand.target.need / USABLE)
    return (
        f"GPUs of at least {least}, a smaller model, a smaller target.dtype, or a lower target.max_model_len"
    )


def _unknown(hw: Hardware) -> str:
    """Links of an unknown version do not count, and --gpu-name could change that."""
    gpus = [gpu for topology in hw.topologies for gpu in topology.gpus]
    joined = any(join.nvlinks for topology in hw.topologies for join in topology.joins.values())
    if joined and any(gpu.nvlink_version is None for gpu in gpus):
        return "; the NVLink version of some GPUs is unknown: give --gpu-name"
    return ""
