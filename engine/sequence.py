"""One sequence on its way through the engine: WAITING -> RUNNING (-> WAITING, preempted) -> FINISHED.

Only Engine.step() and what it calls change a Sequence.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from gammaray.engine.kv import BlockTable
from gammaray.engine.text import OutputText
from gammaray.engine.verifier import Verdict
from gammaray.types import FinishReason, GenerateRequest, KeyCounts, SpeculationStats


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
    finish: FinishReason | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    delivered: int = 0  # generated tokens that left in chunks
    stats: StatsCounter = field(default_factory=lambda: StatsCounter())

    @property
    def rid(self) -> str:
        return f"{self.request.request_id}/{self.index}"

    @property
    def pending(self) -> int:
        """Committed tokens whose KV is not in the pool; 1 while decoding."""
        return len(self.tokens) - self.table.computed

    @property
    def decoding(self) -> bool:
        return self.pending == 1

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens until max_tokens."""
        return self.request.sampling.max_tokens - self.generated

    @property
    def prefilled(self) -> bool:
        """The prompt's KV is there (or was), so that siblings find it in the prefix cache."""
        return self.generated > 0 or self.state is State.FINISHED

    @property
    def key(self) -> tuple[str, str, str | None]:
        return self.request.tenant, self.request.request_class, self.request.plan.drafter


@dataclass(slots=True)
class StatsCounter:
    """Running sums behind SpeculationStats and KeyCounts (math.md section 4)."""

    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    tested: int = 0
    first_accepted: int = 0
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, drafted: int, verified: int, verdict: Verdict, kept: int) -> None:
        """One decode round of which `kept` tokens survived EOS, stop strings and max_tokens."""
        self.rounds += 1
        self.drafted += drafted
        self.verified += verified
        self.accepted += min(kept, len(verdict.path))
        self.emitted += kept
        self.tested += verdict.tested
        self.first_accepted += verdict.first_accepted
        self.lengths[kept] += 1

    def freeze(self) -> SpeculationStats:
        longest = max(self.lengths, default=-1)
        return SpeculationStats(
            rounds=self.rounds,
            drafted=self.drafted,
            verified=self.verified,
            accepted=self.accepted,
            emitted=self.emitted,
            tested=self.tested,
            first_accepted=self.first_accepted,
            lengths=tuple(self.lengths[n] for n in range(longest + 1)),
        )

    def key_counts(self, key: tuple[str, str, str | None], requests: int) -> KeyCounts:
        tenant, request_class, drafter = key
        return KeyCounts(
            tenant=tenant,
            request_class=request_class,
            drafter=drafter,
            requests=requests,
            drafted=self.drafted,
            verified=self.verified,
            accepted=self.accepted,
            emitted=self.emitted,
            tested=self.tested,
            first_accepted=self.first_accepted,
        )
