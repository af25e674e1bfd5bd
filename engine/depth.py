"""Who decides gamma: one function (math.md section 2), and one that shares the step's token budget."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from gammaray.engine.breaker import HOT
from gammaray.engine.sequence import Sequence
from gammaray.types import PolicySnapshot


def allowed_shape(sequence: Sequence, policy: PolicySnapshot) -> tuple[int, int]:
    """Depth and width of the next draft: gamma = min(request and bucket, state, breaker, temperature prior,
    tokens that may still be emitted), and 0 while it rests, as its drafts were worth nothing; 0: plain.
    A round of depth d emits d + 1.

    The bucket, in the plan, was chosen by what was forecast for the request: by the predictor, or by the EWMA
    over its class (routing/plan.py). The breaker holds the rule of the last 16 rounds.
    """
    plan, key = sequence.request.plan, policy.of(sequence.key)
    if plan.drafter is None or not policy.speculation or sequence.breaker.open or sequence.ahead:
        return 0, 1
    if key.stops or plan.epoch < key.epoch or (plan.adaptive and sequence.pace.rest):
        return 0, 1
    depth = min(plan.gamma, key.gamma, sequence.remaining - 1)
    if plan.adaptive:
        depth = sequence.breaker.limit(depth, _is_hot(sequence))
    return max(0, depth), min(plan.width, key.width)


def _is_hot(sequence: Sequence) -> bool:
    """Nobody knows how much is accepted at such a temperature; a forecast would be a better prior."""
    return sequence.request.sampling.temperature > HOT and sequence.request.forecast.alpha is None


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
