"""How processes on one GPU divide its memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gammaray.cluster.devices import USABLE, Hardware
from gammaray.cluster.plans import Demand
from gammaray.cluster.state import State

Need = tuple[int, int]  # bytes of weights, of KV


def shares(memory: int | None, needs: Sequence[Need]) -> list[float]:
    """Fractions of a GPU's memory, USABLE in all. Each gets what it needs; what is left goes to KV, so that
    all hold the same number of tokens. With unknown memory: in proportion to the needs.
    """
    totals = [weights + kv for weights, kv in needs]
    if memory is None:
        return _divide(USABLE, totals)
    spare = USABLE * memory - sum(totals)
    extra = _divide(spare, [kv for _, kv in needs])
    return [(total + more) / memory for total, more in zip(totals, extra, strict=True)]


def _divide(amount: float, parts: Sequence[int]) -> list[float]:
    """In proportion to `parts`; equally when all are 0."""
    whole = sum(parts)
    return [amount * part / whole if whole else amount / len(parts) for part in parts]


def fractions(hw: Hardware, demand: Demand, state: State) -> tuple[list[float], list[float]]:
    """Of each replica, on each of its GPUs, and of each draft. One that shares a copy adds nothing."""
    target = (demand.target.weights, demand.target.kv)
    on_device: defaultdict[int, list[tuple[int, Need]]] = defaultdict(list)  # who, negative for drafts
    for replica, site in enumerate(state.sites):
        for i in site:
            on_device[i].append((replica, target))
    for number, (draft, spot) in enumerate(state.spots):
        if not spot.shared:
            on_device[spot.device].append((-1 - number, (draft.demand.weights, draft.demand.kv)))
    replicas, drafts = [USABLE] * len(state.sites), [0.0] * len(state.spots)
    for i, held in on_device.items():
        found = shares(hw.devices[i].memory, [need for _, need in held])
        for (who, _), share in zip(held, found, strict=True):
            if who < 0:
                drafts[-1 - who] = share
            else:  # the shards of a replica are of one size
                replicas[who] = min(replicas[who], share)
    return replicas, drafts
