"""What flows through gammaray: plain, frozen values that only need the standard library.

HTTP -> GenerateRequest -> engine -> TokenChunk -> HTTP, with a StepReport on the side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
Verification = Literal["coupled", "rejection"]
MAX_TREE_NODES = 64  # of one draft tree: the ancestors of a node are the bits of one 64-bit word


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole generated text must match."""

    kind: Literal["json_object", "json_schema", "regex"]
    text: str = ""  # the schema as JSON text, or the regular expression


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn.

    Order on raw logits: grammar, bad_words, logit_bias, min_tokens, repetition, frequency and presence
    penalty; then temperature, min_p, top_k, top_p. Temperature 0 takes the best after the first half.
    Token i of the output sees exactly the tokens before it, however many one round accepts.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int = 0  # 64 bits; the ingress draws one when the client gave none
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # before so many tokens no EOS, stop token or stop string ends the text
    stop_token_ids: tuple[int, ...] = ()  # end the text like EOS, also with ignore_eos
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output never holds
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)
    repetition_penalty: float = 1.0  # over prompt and output; 1: off
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output, times the count
    grammar: Grammar | None = None
    logprobs: int | None = None  # best tokens to report beside each emitted one; None: no log-probabilities
    prompt_logprobs: int | None = None  # the same for each token of the prompt

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """How one request speculates; chosen by routing, only ever narrowed by the engine."""

    drafter: str | None = None  # None: plain decoding
    gamma: int = 0  # depth of the draft tree
    width: int = 1  # children expanded per level
    verification: Verification = "coupled"


PLAIN = SpeculationPlan()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One HTTP request as it travels from the ingress to a target replica."""

    request_id: str
    prompt: tuple[int, ...]  # token ids
    sampling: SamplingParams = SamplingParams()
    plan: SpeculationPlan = PLAIN
    n: int = 1
    tenant: str = "default"
    request_class: str = "default"
    priority: int = 0  # lower runs earlier, among the requests of its tenant
    generated: tuple[tuple[int, ...], ...] = ()  # per sequence: ids already delivered, to resume a stream


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counts over decode rounds: D, V, A and what was emitted. They add up over rounds and sequences."""

    rounds: int = 0  # decode rounds, plain ones too
    drafted: int = 0  # D: nodes proposed
    verified: int = 0  # V: nodes that reached the target
    accepted: int = 0  # A: nodes committed (cut by EOS, stop and max_tokens)
    emitted: int = 0  # tokens committed in those rounds
    tested: int = 0  # first-tried children that were tested
    first_accepted: int = 0  # ... and accepted
    lengths: tuple[int, ...] = ()  # lengths[k]: rounds that emitted k tokens

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        return SpeculationStats(
            rounds=self.rounds + other.rounds,
            drafted=self.drafted + other.drafted,
            verified=self.verified + other.verified,
            accepted=self.accepted + other.accepted,
            emitted=self.emitted + other.emitted,
            tested=self.tested + other.tested,
            first_accepted=self.first_accepted + other.first_accepted,
            lengths=tuple(map(sum, zip_longest(self.lengths, other.lengths, fillvalue=0))),
        )

    @property
    def tau(self) -> float | None:
        """Mean tokens emitted per round, the bonus token included; None before the first round."""
        return self.emitted / self.rounds if self.rounds else None

    @property
    def alpha(self) -> float | None:
        """Share of first-tried children accepted among those tested; None when none was tested."""
        return self.first_accepted / self.tested if self.tested else None


NO_STATS = SpeculationStats()


@dataclass(frozen=True, slots=True)
class Logprobs:
    """One position: log-softmax of the target's raw logits, before any processing."""

    logprob: float  # of the token that is there
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), most probable first


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """What one round gave one sequence. Chunks of a sequence join without gap or overlap.

    `text` is the text of exactly `ids`: both wait together while a stop string or a UTF-8
    character is incomplete. `stats` comes with the chunk that carries `finish`.
    """

    request_id: str
    sequence: int
    first_position: int  # index of ids[0] among the generated tokens of this sequence
    ids: tuple[int, ...]
    text: str
    finish: FinishReason | None = None
    stats: SpeculationStats | None = None
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache; set with `finish`
    error: str | None = None  # set with finish == "error"
    logprobs: tuple[Logprobs, ...] = ()  # one per id, if asked for
    prompt_logprobs: tuple[Logprobs | None, ...] = ()  # with the first chunk of sequence 0; None: position 0


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    """Versioned limits from the controller; engines apply the newest at the start of a step."""

    version: int = 0
    speculation: bool = True  # False: the global kill switch
    max_gamma: Mapping[tuple[str, str, str], int] = field(default_factory=dict)  # (tenant, class, drafter)


@dataclass(frozen=True, slots=True)
class KeyCounts:
    """One key's share of a step. Counts only: a token id never enters a report."""

    tenant: str
    request_class: str
    drafter: str | None
    running: int  # sequences after the step
    stats: SpeculationStats


@dataclass(frozen=True, slots=True)
class StepReport:
    """What Engine.step() did, for telemetry. Times in seconds."""

    step: int
    running: int
    waiting: int
    prefill_tokens: int
    verified_nodes: int
    kv_used_blocks: int
    kv_total_blocks: int
    preempted: int
    kv_shrunk: int  # drafts cut to a smaller tree, a chain or nothing for want of KV blocks
    drafter_failures: int  # calls of drafters that raised; each costs at most a draft
    draft_s: float
    verify_s: float
    schedule_s: float
    commit_s: float
    counts: tuple[KeyCounts, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the ingress must know of the replica's model."""

    name: str
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    drafters: tuple[str, ...]
    places: int = 576  # sequences that may run or wait at once


@dataclass(frozen=True, slots=True)
class DraftLinks:
    """One tenant's draft workers as a replica sees them. Counts since its start."""

    tenant: str
    drafter: str
    workers: int  # connected now
    resting: int = 0  # of these, left alone for a while, as their answers were late again and again
    losses: int = 0  # of connections
    late: int = 0  # answers that came after their deadline
    drafts: int = 0
    hits: int = 0  # drafts that had been made while the target verified


@dataclass(frozen=True, slots=True)
class Health:
    """How a replica's engine is. Counts are those after its last step."""

    state: Literal["ok", "stuck", "stopped"]  # stuck: one step takes far too long
    since_step_s: float  # since the last step ended; grows while nothing is asked
    running: int  # sequences
    waiting: int
    kv_used_blocks: int
    kv_total_blocks: int
    links: tuple[DraftLinks, ...] = ()
