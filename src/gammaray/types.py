"""What flows through gammaray: plain, frozen values that only need the standard library.

HTTP -> GenerateRequest -> engine -> TokenChunk -> HTTP, with a StepReport on the side, and a
PolicySnapshot that comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
Verification = Literal["coupled", "rejection"]
# Of speculation, best first; what applies to a request is the worst of its tenant's, class's and key's.
State = Literal["on", "contract", "warmup", "ramp", "probe", "shadow", "emergency", "off", "pinned_off"]
# Why a request that was to speculate ended plainly (math.md section 4, fallback rate).
Cause = Literal["low_acceptance", "worker_lost", "timeout", "oom", "kv"]
Key = tuple[str, str, str | None]  # tenant, request class, drafter; None: plain decoding
WARMUP_CLASS = "warmup"  # of synthetic requests: out of alerts, and of every other class's numbers
MEANINGFUL = 32  # tested tokens of one request (math.md section 4, histogram)
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
    adaptive: bool = False  # the depth follows what is accepted; else it is gamma until the end
    state: State = "on"  # when it was planned; of a plain plan, why it is plain
    epoch: int = 0  # of its key's policy; once that has a later one, the request goes on plainly
    shadow: bool = False  # drafts and verifies, but emits what plain decoding would
    breaks: bool = True  # to plain, where little is accepted; False: a drafter is measured


PLAIN = SpeculationPlan()


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a router knew of a request, for whoever learns from how it went. Never a token."""

    features: tuple[float, ...] = ()
    alpha: float | None = None  # as predicted; None: by nothing
    version: int = 0  # of the predictor


NO_FORECAST = Forecast()


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asks of speculation; None: nothing."""

    enabled: bool | None = None
    drafter: str | None = None
    gamma: int | None = None  # 0: plain decoding
    width: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What an ingress knows of a request that is to be planned. What a client wrote is in no repr.

    Of an HTTP request with several prompts this is the longest one, as all run under one plan.
    """

    request_id: str
    tenant: str
    route: Literal["chat", "completions"] = "completions"
    prompt: tuple[int, ...] = field(default=(), repr=False)  # token ids
    text: str | None = field(default=None, repr=False)  # of the prompt; None: it came as token ids
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # names in lower case
    temperature: float = 1.0
    seeded: bool = False  # the client gave a seed
    wish: Wish = field(default=Wish(), repr=False)


@dataclass(frozen=True, slots=True)
class Planned:
    """How a request runs. `notes`: one sentence for each of its client's wishes that was cut back."""

    plan: SpeculationPlan = PLAIN
    request_class: str = "default"
    forecast: Forecast = NO_FORECAST
    notes: tuple[str, ...] = ()


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
    forecast: Forecast = NO_FORECAST
    trace: str | None = None  # W3C traceparent, of a request that is traced


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counts over decode rounds: D, V, A and what was emitted. They add up over rounds and sequences.

    Those from `tested` to `ranks`, without `levels` and `lengths`, are of rounds whose draft was verified
    whole; the last three are the same of all rounds, also of those whose less likely nodes were trimmed away.
    """

    rounds: int = 0  # decode rounds, plain ones too
    drafted: int = 0  # D: nodes proposed
    verified: int = 0  # V: nodes that reached the target
    accepted: int = 0  # A: nodes committed (cut by EOS, stop and max_tokens)
    emitted: int = 0  # tokens committed in those rounds
    tested: int = 0  # first-tried children that were tested
    first_accepted: int = 0  # ... and accepted
    levels: int = 0  # of the trees that reached the target
    lengths: tuple[int, ...] = ()  # lengths[k]: rounds that emitted k tokens
    level_tested: tuple[int, ...] = ()  # [j]: rounds whose level j was tested; sums to `tested`
    level_first: tuple[int, ...] = ()  # ... and its first-tried child accepted; sums to `first_accepted`
    level_accepted: tuple[int, ...] = ()  # ... or any child
    ranks: tuple[int, ...] = ()  # [k]: accepted children that were tried after k siblings
    first_hits: int = 0  # of all rounds: first-tried children accepted
    tries: tuple[int, ...] = ()  # ... [j]: whose level j was tested
    hits: tuple[int, ...] = ()  # ... and any child accepted

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        return SpeculationStats(
            rounds=self.rounds + other.rounds,
            drafted=self.drafted + other.drafted,
            verified=self.verified + other.verified,
            accepted=self.accepted + other.accepted,
            emitted=self.emitted + other.emitted,
            tested=self.tested + other.tested,
            first_accepted=self.first_accepted + other.first_accepted,
            levels=self.levels + other.levels,
            lengths=_sum(self.lengths, other.lengths),
            level_tested=_sum(self.level_tested, other.level_tested),
            level_first=_sum(self.level_first, other.level_first),
            level_accepted=_sum(self.level_accepted, other.level_accepted),
            ranks=_sum(self.ranks, other.ranks),
            first_hits=self.first_hits + other.first_hits,
            tries=_sum(self.tries, other.tries),
            hits=_sum(self.hits, other.hits),
        )

    @property
    def tau(self) -> float | None:
        """Mean tokens emitted per round, the bonus token included; None before the first round."""
        return self.emitted / self.rounds if self.rounds else None

    @property
    def alpha(self) -> float | None:
        """Share of first-tried children accepted among those tested; None when none was tested.

        It does not depend on trimming, so it judges a drafter. Of one request there may be too few rounds.
        """
        return self.first_accepted / self.tested if self.tested else None

    @property
    def acceptance(self) -> float | None:
        """What `alpha` is, of all rounds: how one request went. Trimming, which leaves the likelier, raises
        it."""
        tested = sum(self.tries)
        return self.first_hits / tested if tested else None


NO_STATS = SpeculationStats()


def _sum(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(a, b, fillvalue=0)))


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
class KeyPolicy:
    """What one key may do. `gamma` and `width` are ceilings over the tenant's buckets."""

    state: State = "on"
    gamma: int = 16
    width: int = 8
    share: float = 1.0  # of the requests that may speculate: less in PROBE, RAMP and SHADOW
    epoch: int = 0  # counts how often the key was turned off

    @property
    def stops(self) -> bool:
        """No request may draft under it."""
        return self.state in ("emergency", "off", "pinned_off")


FREE = KeyPolicy()


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    """Versioned limits from the controller; engines and routers apply the newest at once.

    `keys` has what differs from FREE: the effective policy of a key, the worst of its levels. That of a
    drafter that nobody has seen is the one of its class, which stands under None.
    """

    version: int = 0
    speculation: bool = True  # False: the global kill switch
    keys: Mapping[Key, KeyPolicy] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)  # of tenants, where it is not 1
    kv_shares: Mapping[str, float] = field(default_factory=dict)  # of the KV pool, where it is not 1
    drafters: Mapping[tuple[str, str], str] = field(default_factory=dict)  # by tenant and class, if switched
    audit: frozenset[Key] = frozenset()  # whose next texts are compared with the dense model's, see Quality

    def of(self, key: Key) -> KeyPolicy:
        return self.keys.get(key) or self.keys.get((key[0], key[1], None), FREE)


@dataclass(frozen=True, slots=True)
class KeyCounts:
    """One key's share of a step. Counts only: a token id never enters a report.

    Of a shadow key the stats are what would have been. `base_s` is what the step would have taken without
    this key's drafts, `extra_s` what these added (profiled, plus the drafting as measured); both are weighted
    with the key's rounds, so that S = tau * base_s / (base_s + extra_s).
    """

    tenant: str
    request_class: str
    drafter: str | None
    running: int  # sequences after the step
    stats: SpeculationStats
    base_s: float = 0.0
    extra_s: float = 0.0

    @property
    def key(self) -> Key:
        return self.tenant, self.request_class, self.drafter


@dataclass(frozen=True, slots=True)
class Quality:
    """How a finished text relates to the dense model: teacher-forced, at the same positions, in nats."""

    tokens: int
    kl: float  # mean KL(p_dense || p_verify)
    perplexity: float  # of the emitted text under the target


@dataclass(frozen=True, slots=True)
class Finished:
    """One sequence that ended. Times in seconds on the engine's clock."""

    tenant: str
    request_class: str
    drafter: str | None
    state: State  # of its plan
    shadow: bool
    reason: FinishReason
    fallback: Cause | None  # it was to speculate and ended plainly
    index: int  # among the request's sequences, which share the prompt
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    stats: SpeculationStats  # of a shadow: what would have been
    preemptions: int = 0  # how often it gave its KV back and computed it again
    queued_s: float = 0.0  # until it ran first
    first_s: float = 0.0  # until its first token, since it was submitted
    total_s: float = 0.0
    forecast: Forecast = NO_FORECAST
    quality: Quality | None = None  # of those that were audited
    request_id: str = ""

    @property
    def key(self) -> Key:
        return self.tenant, self.request_class, self.drafter

    @property
    def alpha(self) -> float | None:
        """Its acceptance, where that means something: after 32 tested tokens, or once its breaker opened.

        That takes 16 rounds, of which most test one token: without these the lower peak would be missing.
        Of all its rounds, as hardly one in 16 was not trimmed.
        """
        known = sum(self.stats.tries) >= MEANINGFUL or self.fallback == "low_acceptance"
        return self.stats.acceptance if known else None

    @property
    def per_token_s(self) -> float | None:
        """Time per output token after the first (TPOT); None for a single one."""
        return (self.total_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Reuse:
    """Prompt tokens that had been seen before, so that their KV could have been kept, and that was."""

    seen: int = 0
    reused: int = 0

    def __add__(self, other: Reuse) -> Reuse:
        return Reuse(self.seen + other.seen, self.reused + other.reused)


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced request's part of a step."""

    request_id: str
    trace: str
    phase: Literal["prefill", "decode"]
    fed: int  # tokens
    drafted: int
    accepted: int
    emitted: int


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
    finished: tuple[Finished, ...] = ()
    traced: tuple[Traced, ...] = ()
    target_reuse: Reuse = Reuse()  # of this step
    draft_reuse: Reuse = Reuse()
    trimmed_nodes: int = 0  # drafted, but not worth verifying in this batch


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
