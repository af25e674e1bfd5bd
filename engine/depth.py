"""Who decides gamma: one function (math.md section 2), and one that shares the step's token budget."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from gammaray.engine.sequence import Sequence
from gammaray.types import PolicySnapshot


def allowed_depth(sequence: Sequence, policy: PolicySnapshot) -> int:
    """gamma = min(request, policy, tokens that may still be emitted). A round of depth d emits d + 1."""
    plan = sequence.request.plan
    if plan.drafter is None or not policy.speculation:
        return 0
    tenant, request_class, drafter = sequence.key
    limits = (
        plan.gamma,
        policy.max_gamma.get((tenant, request_class, drafter or ""), plan.gamma),
        sequence.remaining - 1,
    )
    return max(0, min(limits))


def share_depth(wants: Seq[tuple[int, int]], room: int) -> list[int]:
    """Depths under a node budget: the largest common cap on `(depth, width)` wants that fits `room`."""

    def nodes(cap: int) -> int:
        return sum(min(depth, cap) * width for depth, width in wants)

    cap = max((depth for depth, _ in wants), default=0)
    while cap and nodes(cap) > room:
        cap -= 1
    return [min(depth, cap) for depth, _ in wants]


def reserved_slots(context: int, gamma: int) -> int:
    """KV slots that a speculative sequence may hold: 1.5 x (context + gamma + 1)."""
    return (3 * (context + gamma + 1) + 1) // 2
