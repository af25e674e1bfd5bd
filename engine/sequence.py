"""One sequence on its way through the engine: WAITING -> RUNNING (-> WAITING, preempted) -> FINISHED.

Only Engine.step() and what it calls change a Sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from gammaray.engine.breaker import Breaker
from gammaray.engine.constraints import Constraints
from gammaray.engine.grammar import Matcher
from gammaray.engine.kv import BlockTable
from gammaray.engine.pace import Pace
from gammaray.engine.tally import Tally
from gammaray.engine.text import OutputText
from gammaray.types import Cause, FinishReason, GenerateRequest, Key, Logprobs, TokenChunk

TROUBLED_ROUNDS = 4  # in a row without the draft that they should have had: the sequence decodes plainly


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
    ends: frozenset[int] = frozenset()  # tokens that end it
    constraints: Constraints | None = None
    leader: Sequence | None = None  # the request's first sequence, whose prompt KV the others share
    state: State = State.WAITING
    cached_tokens: int = 0
    preemptions: int = 0
    suspect_rounds: int = 0  # rounds that it still runs alone, since a step with it failed
    overtaken: int = 0  # admissions of others while it was first in its queue and did not fit
    delivered: int = 0  # generated tokens that left in chunks
    logprobs: list[Logprobs] = field(default_factory=list)  # of generated tokens that have not left yet
    prompt_logprobs: list[Logprobs | None] | None = None  # as far as computed; None: not asked for, or left
    tally: Tally = field(default_factory=Tally)  # of what was emitted
    shadow: Tally = field(default_factory=Tally)  # of what would have been, were it no shadow
    ahead: int = 0  # tokens that a shadow's last draft would have given at once, and that are still to come
    breaker: Breaker = field(default_factory=Breaker)
    pace: Pace = field(default_factory=Pace)  # of an adaptive plan
    trouble: Cause | None = None  # of the last round that should have had a draft
    troubled: int = 0  # such rounds in a row
    begun: tuple[int, int] | None = None  # asynchronously: depth and width of a draft that is under way
    submitted: float = 0.0  # these on the engine's clock
    started: float | None = None
    first_token: float | None = None

    def keep(self, tokens: Iterable[int]) -> tuple[int, FinishReason | None]:
        """Append tokens until an end token, a stop string or max_tokens ends the text inside the block."""
        kept = 0
        for token in tokens:
            kept += 1
            self.tokens.append(token)
            if self.constraints is not None:
                self.constraints.advance(token)
            if token in self.ends:
                self.output.end(token)
                return kept, "stop"
            if self.output.push(token):
                return kept, "stop"
            if self.remaining <= 0:
                return kept, "length"
        return kept, None

    def chunk(self, ids: list[int], text: str) -> TokenChunk:
        """The next `ids`, which leave with it, and what is known of them."""
        chunk = TokenChunk(
            request_id=self.request.request_id,
            sequence=self.index,
            first_position=self.delivered,
            ids=tuple(ids),
            text=text,
            logprobs=tuple(self.logprobs[: len(ids)]),
            prompt_logprobs=() if self.scoring else tuple(self.prompt_logprobs or ()),
        )
        del self.logprobs[: len(ids)]
        self.prompt_logprobs = None
        self.delivered += len(ids)
        return chunk

    @property
    def rid(self) -> str:
        return f"{self.request.request_id}/{self.index}"

    @property
    def matcher(self) -> Matcher | None:
        return self.constraints.matcher if self.constraints else None

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
    def scoring(self) -> bool:
        """Its prompt's log-probabilities are still incomplete, so all of it must be computed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.request.prompt)

    @property
    def prefilled(self) -> bool:
        """Siblings need not wait: they find the prompt's KV in the prefix cache, or never will."""
        return self.generated > 0 or self.state is State.FINISHED

    @property
    def key(self) -> Key:
        return self.request.tenant, self.request.request_class, self.request.plan.drafter

    def note(self, trouble: Cause | None) -> None:
        """Whether a round that should have had a draft had one, or none for want of something to say."""
        self.trouble, self.troubled = trouble, self.troubled + 1 if trouble else 0

    @property
    def fallback(self) -> Cause | None:
        """Why it decodes plainly, though it was to speculate."""
        if self.request.plan.shadow:
            return None
        if self.breaker.open:
            return "low_acceptance"
        return self.trouble if self.troubled >= TROUBLED_ROUNDS else None
