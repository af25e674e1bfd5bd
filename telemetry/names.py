"""Every metric, attribute and span name, once.

The `gen_ai.*` names and their bucket edges are those of OpenTelemetry's GenAI semantic conventions, written
out here because the package marks them as moved. Nothing of speculation is standardised there, so that is
`gammaray.*`. Units are UCUM: `{token}` is an annotation, `1` a ratio.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from gammaray.types import Cause, FinishReason, State

Kind = Literal["counter", "gauge", "histogram"]

# Attributes. Values come from the configuration or are one of a few words; never text of a request.
TENANT, CLASS, DRAFTER, STATE, REGION = KEY = ("tenant", "class", "drafter", "state", "region")
CAUSE = "cause"  # of a fallback
REASON = "reason"  # why a sequence ended
PHASE = "phase"  # draft, verify, schedule, state
MEMORY = "memory"  # target, draft
QUANTILE = "quantile"
RULE, LEVEL = "rule", "level"  # of a decision
ROUTE, STATUS, METHOD = "http.route", "http.response.status_code", "http.request.method"
OPERATION, PROVIDER, MODEL = "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"
TOKEN_TYPE = "gen_ai.token.type"  # input, output
INSTANCE = "service.instance.id"  # of the resource: which process it was
OTHER = "other"  # tenants beyond the limit, with their classes and drafters
NO_DRAFTER = "none"  # plain decoding

STATES: tuple[State, ...] = get_args(State)  # the number of a state is its place here: 0 is best
CAUSES: tuple[Cause, ...] = get_args(Cause)
REASONS: tuple[FinishReason, ...] = get_args(FinishReason)


@dataclass(frozen=True, slots=True)
class Metric:
    """`edges`: upper bounds of a histogram's buckets."""

    name: str
    kind: Kind
    unit: str
    description: str
    edges: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """The family's name in Prometheus, by OpenTelemetry's rules of compatibility."""
        name = re.sub(r"[^a-zA-Z0-9:]+", "_", self.name) + {"s": "_seconds", "By": "_bytes"}.get(
            self.unit, ""
        )
        return f"{name}_total" if self.kind == "counter" else name

    @property
    def series(self) -> tuple[str, ...]:
        """What a query may ask for."""
        parts = ("_bucket", "_sum", "_count") if self.kind == "histogram" else ("",)
        return tuple(self.prometheus + part for part in parts)


def _counter(name: str, unit: str, description: str) -> Metric:
    return Metric(name, "counter", unit, description)


def _gauge(name: str, unit: str, description: str) -> Metric:
    return Metric(name, "gauge", unit, description)


# Of a key and its state, counted by the replicas. A shadow's are what would have been.
ROUNDS = _counter("gammaray.spec.rounds", "{round}", "Decode rounds, plain ones too")
DRAFTED = _counter("gammaray.spec.drafted", "{token}", "Draft tokens proposed")
VERIFIED = _counter("gammaray.spec.verified", "{token}", "Draft tokens that the target looked at")
ACCEPTED = _counter("gammaray.spec.accepted", "{token}", "Draft tokens committed")
EMITTED = _counter(
    "gammaray.spec.emitted", "{token}", "Tokens committed in decode rounds, bonus tokens included"
)
TESTED = _counter(
    "gammaray.spec.tested", "{token}", "First-tried draft tokens tested, of drafts verified whole"
)
FIRST_ACCEPTED = _counter("gammaray.spec.first_accepted", "{token}", "First-tried draft tokens accepted")
LEVELS_ACCEPTED = _counter(
    "gammaray.spec.levels_accepted", "{level}", "Draft levels of which any token was accepted"
)
PLANNED = _counter("gammaray.spec.planned", "{request}", "Sequences that ended and were to speculate")
FALLBACKS = _counter("gammaray.spec.fallbacks", "{request}", "... of these, that ended plainly, by cause")
FINISHED = _counter("gammaray.requests.finished", "{request}", "Sequences that ended, by reason")
SPEC = (ROUNDS, DRAFTED, VERIFIED, ACCEPTED, EMITTED, TESTED, FIRST_ACCEPTED, LEVELS_ACCEPTED)

# Of a replica's engine.
STEPS = _counter("gammaray.engine.steps", "{step}", "Engine steps")
PREFILLED = _counter("gammaray.engine.prefilled", "{token}", "Prompt tokens computed")
PREEMPTED = _counter(
    "gammaray.engine.preempted", "{request}", "Sequences that gave their KV back and wait again"
)
KV_SHRUNK = _counter("gammaray.engine.kv_shrunk", "{draft}", "Drafts cut for want of KV blocks")
TRIMMED = _counter(
    "gammaray.engine.trimmed", "{token}", "Draft tokens left out, as verifying them was not worth it"
)
DRAFTER_FAILURES = _counter("gammaray.engine.drafter_failures", "{call}", "Calls of drafters that failed")
ENGINE = (STEPS, PREFILLED, PREEMPTED, KV_SHRUNK, DRAFTER_FAILURES, TRIMMED)
PHASE_TIME = _counter("gammaray.engine.phase.time", "s", "Time of the engine's thread by phase of a step")
PROMPT_SEEN = _counter("gammaray.kv.prompt.seen", "{token}", "Prompt tokens whose KV could have been kept")
PROMPT_REUSED = _counter("gammaray.kv.prompt.reused", "{token}", "... of these, whose KV had been kept")
REUSE = (PROMPT_SEEN, PROMPT_REUSED)
RUNNING = _gauge("gammaray.engine.running", "{request}", "Sequences that run")
WAITING = _gauge("gammaray.engine.waiting", "{request}", "Sequences that wait for a place")
KV_USED = _gauge("gammaray.kv.blocks.used", "{block}", "KV blocks in use")
KV_TOTAL = _gauge("gammaray.kv.blocks.total", "{block}", "KV blocks that there are")
LOAD = (RUNNING, WAITING)
KV = (KV_USED, KV_TOTAL)

# Of each sequence that ended.
TTFT = Metric(
    "gen_ai.server.time_to_first_token",
    "histogram",
    "s",
    "Time to the first token, since the engine was asked",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TPOT = Metric(
    "gen_ai.server.time_per_output_token",
    "histogram",
    "s",
    "Time per output token after the first",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_DOUBLED = tuple(0.01 * 2**i for i in range(14))
DURATION = Metric(
    "gen_ai.server.request.duration", "histogram", "s", "Time of a sequence in the engine", _DOUBLED
)
TOKENS = Metric(
    "gen_ai.client.token.usage",
    "histogram",
    "{token}",
    "Tokens of the prompt and of the output",
    tuple(4**i for i in range(14)),
)
QUEUED = Metric("gammaray.request.queue.time", "histogram", "s", "Time until a sequence ran first", _DOUBLED)
ALPHA = Metric(
    "gammaray.spec.request.alpha",
    "histogram",
    "1",
    "Acceptance of a sequence, of those with 32 tested tokens or more",
    tuple(round(0.04 * i, 2) for i in range(1, 25)),
)
TAU = Metric(
    "gammaray.spec.request.tau",
    "histogram",
    "{token}",
    "Mean tokens a round of a sequence that drafted",
    tuple(1 + 0.5 * i for i in range(1, 15)),
)
KL = Metric(
    "gammaray.quality.kl",
    "histogram",
    "{nat}",
    "Mean KL divergence from the dense model, of audited sequences",
    (1e-6, 1e-5, 1e-4, 1e-3, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)
PERPLEXITY = Metric(
    "gammaray.quality.perplexity",
    "histogram",
    "1",
    "Perplexity of the emitted text under the target, of audited sequences",
    (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0),
)
REQUEST = (TTFT, TPOT, DURATION, TOKENS, QUEUED, ALPHA, TAU, KL, PERPLEXITY)

# Of the ingress.
HTTP = Metric(
    "http.server.request.duration",
    "histogram",
    "s",
    "Time of an HTTP request, until its last byte",
    (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
)
OPEN = _gauge("gammaray.ingress.open", "{request}", "HTTP requests in progress")

# As the controller sees a key, over its last window.
KEY_GAUGES = {
    "S": _gauge("gammaray.spec.speedup", "1", "Marginal speed-up S over plain decoding; break-even is 1"),
    "S_low": _gauge("gammaray.spec.speedup.low", "1", "Lower bound of S"),
    "S_high": _gauge("gammaray.spec.speedup.high", "1", "Upper bound of S"),
    "alpha": _gauge("gammaray.spec.alpha", "1", "Acceptance: share of first-tried draft tokens accepted"),
    "tau": _gauge("gammaray.spec.tau", "{token}", "Mean tokens a round, the bonus token included"),
    "SE": _gauge("gammaray.spec.efficiency", "1", "alpha times tau"),
    "FR": _gauge("gammaray.spec.fallback_rate", "1", "Share of planned requests that ended plainly"),
    "TWE": _gauge(
        "gammaray.spec.tree_width_effective", "1", "Share of the tree's width that 95 % of acceptance needs"
    ),
    "node_yield": _gauge("gammaray.spec.node_yield", "1", "Accepted per verified draft token"),
    "gamma": _gauge("gammaray.spec.gamma", "{level}", "Ceiling of the draft depth"),
    "width": _gauge("gammaray.spec.width", "{token}", "Ceiling of the draft tree's width"),
    "share": _gauge("gammaray.spec.share", "1", "Share of the requests that may speculate"),
    "bimodal": _gauge("gammaray.spec.bimodal", "1", "1 when the acceptance of requests has two peaks"),
}
KEY_STATE = _gauge("gammaray.spec.state", "1", "Place of the key's state, 0 (on) to 8 (pinned_off)")
ALPHA_QUANTILE = _gauge("gammaray.spec.alpha.quantile", "1", "Quantiles of the acceptance of requests")
TENANT_GAUGES = {
    "S": _gauge("gammaray.tenant.speedup", "1", "Speed-up S of the tenant"),
    "alpha": _gauge("gammaray.tenant.alpha", "1", "Acceptance of the tenant"),
    "tau": _gauge("gammaray.tenant.tau", "{token}", "Mean tokens a round of the tenant"),
    "SE": _gauge("gammaray.tenant.efficiency", "1", "alpha times tau of the tenant"),
    "FR": _gauge("gammaray.tenant.fallback_rate", "1", "Fallback rate of the tenant"),
}
TENANT_STATE = _gauge("gammaray.tenant.state", "1", "Place of the tenant's state, 0 (on) to 8 (pinned_off)")
KEYS = _gauge("gammaray.spec.keys", "{key}", "Keys by state, also of tenants named `other`")

# Of the controller itself.
DRAFT_TARGET = _gauge(
    "gammaray.spec.draft_target_ratio", "1", "Draft time per token over a plain step's time"
)
LAST_TICK = _gauge(
    "gammaray.controller.last_tick", "s", "When the controller decided last, in seconds since 1970"
)
INTERVAL = _gauge("gammaray.controller.interval", "s", "Time between two decisions")
VERSION = _gauge("gammaray.controller.policy", "1", "Version of the policy")
SPECULATION = _gauge("gammaray.controller.speculation", "1", "0 while the kill switch holds")
POOL_USED = _gauge("gammaray.kv.pool.used", "{block}", "KV blocks in use in all replicas")
POOL_TOTAL = _gauge("gammaray.kv.pool.total", "{block}", "KV blocks in all replicas")
CONTROLLER = (DRAFT_TARGET, LAST_TICK, INTERVAL, VERSION, SPECULATION)
POOL_REUSE = _gauge(
    "gammaray.kv.pool.reuse_ratio", "1", "Share of reusable prompt tokens whose KV was reused"
)
POOL = (POOL_USED, POOL_TOTAL, POOL_REUSE)
DECISIONS = _counter("gammaray.controller.decisions", "{decision}", "Decisions, by rule")

UP = _gauge("gammaray.process.up", "1", "0 when a process of this node did not answer in time")

METRICS: tuple[Metric, ...] = (
    *SPEC,
    PLANNED,
    FALLBACKS,
    FINISHED,
    *ENGINE,
    PHASE_TIME,
    *REUSE,
    *LOAD,
    *KV,
    *REQUEST,
    HTTP,
    OPEN,
    *KEY_GAUGES.values(),
    KEY_STATE,
    ALPHA_QUANTILE,
    *TENANT_GAUGES.values(),
    TENANT_STATE,
    KEYS,
    *CONTROLLER,
    *POOL,
    DECISIONS,
    UP,
)

# Spans, and what they carry.
SPAN_REQUEST = "gammaray.request"  # in the ingress
SPAN_QUEUE, SPAN_PREFILL, SPAN_DECODE = "gammaray.queue", "gammaray.prefill", "gammaray.decode"
SPAN_ROUND = "gammaray.round"
SPAN_SCHEDULE, SPAN_DRAFT, SPAN_VERIFY, SPAN_ACCEPT = (
    "gammaray.schedule",
    "gammaray.draft",
    "gammaray.verify",
    "gammaray.accept",
)
REQUEST_ID = "gammaray.request_id"
ROUND, BATCH = "gammaray.round.number", "gammaray.batch"
SPAN_DRAFTED, SPAN_ACCEPTED, SPAN_EMITTED = (
    "gammaray.spec.drafted",
    "gammaray.spec.accepted",
    "gammaray.spec.emitted",
)
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
CACHED_TOKENS, FINISH_REASONS = "gen_ai.usage.cache_read.input_tokens", "gen_ai.response.finish_reasons"
