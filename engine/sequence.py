"""One sequence on its way through the engine: WAITING -> RUNNING (-> WAITING, preempted) -> FINISHED.

Only Engine.step() and what it calls change a Sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gammaray.engine.kv import BlockTable
from gammaray.engine.text import OutputText
from gammaray.engine.verifier import Verdict
from gammaray.types import NO_STATS, GenerateRequest, SpeculationStats

Key = tuple[str, str, str | None]  # tenant, request class, drafter


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Sequence `index` of a request. `tokens` is prompt and output; all but the last `pending` have KV."""

    request: GenerateRequest
    index: int
    tokens: list[int]
    output: OutputText
    table: BlockTable
    leader: Sequence | None = None  # the request's first sequence, whose prompt KV the others share
    state: State = State.WAITING
    cached_tokens: int = 0
    preemptions: int = 0
    overtaken: int = 0  # admissions of others while it was first in its queue and did not fit
    delivered: int = 0  # generated tokens that left in chunks
    stats: SpeculationStats = NO_STATS

    @property
    def rid(self) -> str:
        return f"{self.request.request_id}/{self.index}"

    @property
    def pending(self) -> int:
        """Committed tokens whose KV is not in the pool; 1 while decoding."""
        return len(self.tokens) - self.table.computed

    @property
    def decoding(self) -> bool:
        """One token a round from here on; before, and after a preemption, it is prefilling."""
        return self.pending == 1 and self.generated > 0

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens until max_tokens."""
        return self.request.sampling.max_tokens - self.generated

    @property
    def prefilled(self) -> bool:
        """Siblings need not wait: they find the prompt's KV in the prefix cache, or never will."""
        return self.generated > 0 or self.state is State.FINISHED

    @property
    def key(self) -> Key:
        return self.request.tenant, self.request.request_class, self.request.plan.drafter


def round_stats(nodes: int, verdict: Verdict, kept: int) -> SpeculationStats:
    """One decode round of which `kept` tokens survived EOS, stop strings and max_tokens."""
    return SpeculationStats(
        rounds=1,
        drafted=nodes,
        verified=nodes,
        accepted=min(kept, len(verdict.path)),
        emitted=kept,
        tested=verdict.tested,
        first_accepted=verdict.first_accepted,
        lengths=(0,) * kept + (1,),
    )
