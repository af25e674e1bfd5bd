"""The configuration: one frozen tree, read from YAML, checked once.

Every key works. An unknown key is an error that names the nearest one; a key that a later version
will bring is an error that says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from gammaray.drafter_config import CompositeDrafter, Drafter, Dtype, ModelDrafter, check_nodes
from gammaray.errors import ConfigError
from gammaray.packaged import fitting_head
from gammaray.types import WARMUP_CLASS, Verification
from gammaray.validation import Strict, explain, nearest, path
from gammaray.yamlfile import read, read_file

NO_KEYS = "no request can reach it: it has no api_keys (`gammaray key` makes one)"
KEY_LISTS = {"api_keys", "operator_keys"}  # no value below these is ever shown
FOREIGN = {  # flags of vLLM, as keys
    "max_num_seqs": "max_batch",
    "max_num_batched_tokens": "token_budget",
    "gpu_memory_utilization": "target.kv.memory",
    "enable_prefix_caching": "target.kv.prefix_cache",
}


class KV(Strict):
    """The paged KV pool: `num_blocks` exactly, or as many as fit into the share `memory` of what is free."""

    block_size: int = Field(default=16, ge=1, le=1024)  # tokens
    memory: float = Field(default=0.85, gt=0, le=1)
    num_blocks: int | None = Field(default=None, ge=2)
    prefix_cache: bool = True


class Target(Strict):
    """The model whose output distribution is served."""

    foreign: ClassVar[Mapping[str, str]] = FOREIGN
    model: str = Field(min_length=1)  # alias, Hugging Face id, local folder, or GGUF file
    dtype: Dtype = "auto"
    tensor_parallel: int = Field(
        default=1, ge=1, le=8
    )  # GPUs (or processes) that share one replica's weights
    replicas: int = Field(default=1, ge=1, le=256)
    deterministic: bool = False  # the same bits in every batch, with and without speculation
    max_model_len: int | None = Field(
        default=None, ge=2
    )  # tokens of prompt and output; None: the model's own
    kv: KV = KV()
    max_batch: int = Field(default=64, ge=1)  # sequences that run at once
    token_budget: int | None = Field(default=None, ge=1)  # tokens a step; None: chosen by the engine
    max_waiting: int = Field(default=512, ge=1)  # sequences that wait for the engine; beyond it: 503
    asynchronous: bool = False  # a half of the sequences that speculate drafts while the other is verified

    @model_validator(mode="after")
    def _works_together(self) -> Target:
        if self.deterministic and self.tensor_parallel > 1:
            text = "deterministic does not work with tensor_parallel above 1 yet"
            raise PydanticCustomError("parallel", text)
        return self


class QualityGate(Strict):
    """KL(dense || verified) over the same positions, in nats; a violation turns the drafter's key off."""

    kl_threshold: float = Field(default=0.05, gt=0, allow_inf_nan=False)
    rollback_on_violation: bool = True  # to the drafter's previous version, if there is one


class Canary(Strict):
    """A new drafter on trial: in the shadow on this share of requests, then on this share for real."""

    drafter: str
    share: float = Field(default=0.05, gt=0, le=0.5)


class Speculation(Strict):
    """A tenant's draft shape; requests may ask for less."""

    enabled: bool = True
    enabled_ratio: float = Field(default=1.0, ge=0, le=1)  # of requests, by a stable hash
    gamma: int = Field(default=4, ge=1, le=16)  # draft depth
    tree_width: int = Field(default=1, ge=1, le=8)  # children a level
    adaptive: bool = True  # depth and width follow what is accepted
    verification: Verification = "coupled"
    fallback_on_alpha_below: float = Field(default=0.3, ge=0, le=1)  # over 10 s: the class goes plain
    disable_on_fallback_rate_above: float = Field(default=0.15, gt=0, le=1)  # the tenant goes plain
    quality_gate: QualityGate = QualityGate()
    canary: Canary | None = None

    @model_validator(mode="after")
    def _fits(self) -> Speculation:
        check_nodes(self.gamma, self.tree_width)
        return self


def _as_tuple(value: Any) -> Any:
    """YAML has lists only."""
    return tuple(value) if isinstance(value, list) else value


Range = Annotated[tuple[float, float], BeforeValidator(_as_tuple)]


class Bucket(Strict):
    """The draft shape of requests whose predicted acceptance lies in `alpha`."""

    alpha: Range
    gamma: int = Field(ge=0, le=16)  # 0: plain
    width: int = Field(default=1, ge=1, le=8)

    @model_validator(mode="after")
    def _makes_sense(self) -> Bucket:
        low, high = self.alpha
        if not 0 <= low < high <= 1:
            text = "alpha must be [low, high] with 0 <= low < high <= 1 (got {alpha})"
            raise PydanticCustomError("range", text, {"alpha": list(self.alpha)})
        check_nodes(self.gamma, self.width)
        return self


def _buckets_partition(buckets: list[Bucket]) -> list[Bucket]:
    """Sorted, without gap or overlap, from 0 to 1."""
    edges = [edge for bucket in sorted(buckets, key=lambda b: b.alpha) for edge in bucket.alpha]
    if (edges and (edges[0], edges[-1]) != (0, 1)) or edges[1:-1:2] != edges[2::2]:
        raise PydanticCustomError("buckets", "must cover alpha from 0 to 1 without gap or overlap")
    return sorted(buckets, key=lambda b: b.alpha, reverse=True)


Buckets = Annotated[list[Bucket], AfterValidator(_buckets_partition)]


class When(Strict):
    """All that is set must hold."""

    prompt_tokens_over: int | None = Field(default=None, ge=0)
    prompt_tokens_below: int | None = Field(default=None, ge=1)
    temperature_over: float | None = Field(default=None, ge=0, le=2)
    temperature_below: float | None = Field(default=None, gt=0, le=2)
    route: Literal["chat", "completions"] | None = None
    header: Mapping[str, str] = Field(default_factory=dict, max_length=8)  # names in any case, exact values
    looks_like: Literal["chat", "code", "summarize"] | None = None  # by the detector of routing/detect.py


class Class(Strict):
    """Requests of a tenant that speculate on their own terms; the first class that fits is theirs."""

    name: str = Field(pattern=r"^[a-z0-9_-]{1,32}$")
    when: When = When()  # without a condition it takes every request that comes to it
    drafter: str | None = None  # None: the tenant's
    fallback_drafter: str | None = None
    buckets: Buckets | None = None
    enabled_ratio: float | None = Field(default=None, ge=0, le=1)


class Choice(Strict):
    """Which drafter for which prompt length and load; the first that fits."""

    prompt_tokens_over: int = Field(default=0, ge=0)
    concurrency_over: int = Field(default=0, ge=0)  # running sequences of the replicas, in the mean
    drafter: str


def _sha256(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-fA-F]{64}", value):
        text = "must be the SHA-256 of a key, 64 hex digits; `gammaray key` makes a key and this line"
        raise PydanticCustomError("sha256", text)
    return value.lower()


class Key(Strict):
    """An API key as the server knows it. `name` is what logs call it."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    sha256: Annotated[str, BeforeValidator(_sha256)]


def _names_differ(keys: list[Key]) -> list[Key]:
    names = [key.name for key in keys]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise PydanticCustomError("name", "two keys are named {name}", {"name": repr(twice)})
    return keys


Keys = Annotated[list[Key], AfterValidator(_names_differ)]


class Limits(Strict):
    """Of one tenant; None: no limit. Every ingress process counts on its own, but for the tokens of a day."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    max_concurrent: int | None = Field(default=None, ge=1)  # requests that are open at once
    max_tokens: int | None = Field(default=None, ge=1)  # of one choice; also the default of its requests
    tokens_per_day: int | None = Field(default=None, ge=1)  # prompt and output, of a day in UTC


class Pool(Strict):
    """A tenant's own draft workers, where its drafter does not live in the target's process."""

    workers: int = Field(default=1, ge=1, le=64)  # at least so many
    max_workers: int | None = Field(default=None, ge=1, le=64)  # None: no more than `workers`

    @model_validator(mode="after")
    def _ordered(self) -> Pool:
        if self.max_workers is not None and self.max_workers < self.workers:
            raise PydanticCustomError("order", "max_workers must not be below workers")
        return self

    @property
    def most(self) -> int:
        return self.max_workers or self.workers


class Tenant(Strict):
    """A line of business. `drafter` names an entry of `drafters`; None decodes plainly."""

    api_keys: Keys = Field(default_factory=list)
    drafter: str | None = None
    fallback_drafter: str | None = None  # tried when the acceptance of `drafter` stays low
    choices: list[Choice] = Field(default_factory=list, max_length=16)  # overrides `drafter`
    pool: Pool = Pool()
    buckets: Buckets = Field(default_factory=list)
    speculation: Speculation = Speculation()
    limits: Limits = Limits()
    classes: list[Class] = Field(default_factory=list, max_length=16)
    region: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,64}$")  # label of its metrics
    weight: float = Field(default=1.0, gt=0, le=100)  # of its share of the engine's turns and KV
    kv_share: float = Field(default=1.0, gt=0, le=1)  # of the KV pool, at most, while others wait
    warmup_s: float | None = Field(default=None, ge=0, le=86_400)  # None: 0 without weights, else 1800

    @model_validator(mode="after")
    def _is_tried_beside_another(self) -> Tenant:
        canary = self.speculation.canary
        if canary is not None and canary.drafter == self.drafter:
            text = "speculation.canary: {drafter} is the tenant's drafter already; name another one"
            raise PydanticCustomError("canary", text, {"drafter": repr(canary.drafter)})
        return self

    @model_validator(mode="after")
    def _classes_differ(self) -> Tenant:
        names = [one.name for one in self.classes]
        reserved = ("default", WARMUP_CLASS)
        if twice := next((n for n in names if names.count(n) > 1 or n in reserved), None):
            context = {"name": repr(twice)}
            raise PydanticCustomError(
                "name", "classes: another class, or one of the server's own, is named {name}", context
            )
        return self

    def named_drafters(self) -> Iterator[tuple[str, str]]:
        """Every drafter that this tenant may use, and the key that names it."""
        canary = self.speculation.canary
        named = [("drafter", self.drafter), ("fallback_drafter", self.fallback_drafter)]
        named += [("speculation.canary.drafter", canary.drafter if canary else None)]
        named += [(f"choices[{i}].drafter", choice.drafter) for i, choice in enumerate(self.choices)]
        for i, one in enumerate(self.classes):
            named += [(f"classes[{i}].drafter", one.drafter)]
            named += [(f"classes[{i}].fallback_drafter", one.fallback_drafter)]
        yield from ((place, name) for place, name in named if name is not None)


class Server(Strict):
    """Where HTTP listens, and what it lets in."""

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=1, le=65535)
    require_api_key: bool = False  # False: a request without a key belongs to the tenant `default`
    operator_keys: Keys = Field(default_factory=list)  # for /gammaray/v1/
    protect_metrics: bool = False  # /metrics and /dashboard need an operator key too
    max_body_bytes: int = Field(default=4 * 2**20, ge=1)
    request_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    access_log: str | None = Field(default=None, min_length=1)  # file; one JSON line a request


class Placement(Strict):
    """What a draft GPU must have: a direct NVLink to the target's of at least this version."""

    min_nvlink_version: float = Field(default=4, ge=1, allow_inf_nan=False)


class Telemetry(Strict):
    """What is told about requests, and where."""

    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://")  # gRPC; metrics and traces
    prometheus_port: int = Field(default=9464, ge=0, le=65535)  # one endpoint a node; 0: none
    tenants: int = Field(default=200, ge=1, le=10_000)  # that metrics tell apart; the rest is `other`
    vllm_names: bool = False  # the counters of vLLM beside our own
    trace_ratio: float = Field(default=0.0, ge=0, le=1)  # of requests; traces need otlp_endpoint
    log_prompts: bool = False  # prompts and answers in the access log


class Controller(Strict):
    """The loop that turns speculation down, off and on."""

    enabled: bool = True
    interval_s: float = Field(default=5.0, ge=0.1, le=60)
    audit_log: str | None = Field(default=None, min_length=1)  # file; one JSON line a decision
    predictor: bool = True  # learn each request's acceptance; else the class's own is taken


class Config(Strict):
    """The whole tree. A tenant named `default` is always there; requests without a key are its own."""

    target: Target
    drafters: Mapping[str, Drafter] = {}
    tenants: Mapping[str, Tenant] = {}
    placement: Placement = Placement()
    controller: Controller = Controller()
    telemetry: Telemetry = Telemetry()
    server: Server = Server()

    @model_validator(mode="before")
    @classmethod
    def _default_tenant(cls, data: Any) -> Any:
        tenants = data.get("tenants", {}) if isinstance(data, dict) else None
        return {**data, "tenants": {"default": {}, **tenants}} if isinstance(tenants, dict) else data

    @model_validator(mode="after")
    def _drafters_exist(self) -> Config:
        for name, tenant in self.tenants.items():
            for place, drafter in tenant.named_drafters():
                if drafter not in self.drafters:
                    text = "tenants.{name}.{place}: no drafter is named {drafter}{hint}"
                    hint = nearest(drafter, self.drafters)
                    context = {"name": name, "place": place, "drafter": repr(drafter), "hint": hint}
                    raise PydanticCustomError("drafter", text, context)
        return self

    @model_validator(mode="after")
    def _composites_are_of_others(self) -> Config:
        for name, composite in self.drafters.items():
            for part in composite.drafters if isinstance(composite, CompositeDrafter) else ():
                if why := self._unfit(part):
                    text = "drafters.{name}.drafters: {part} {why}"
                    context = {"name": name, "part": repr(part), "why": why}
                    raise PydanticCustomError("composite", text, context)
        return self

    def _unfit(self, part: str) -> str | None:
        """Why a drafter cannot be a part of a composite one."""
        if (own := self.drafters.get(part)) is None:
            return f"is not the name of a drafter{nearest(part, self.drafters)}"
        if isinstance(own, CompositeDrafter):
            return "is a composite itself; name its parts"
        if getattr(own, "draft_sampling", False):
            return "draws its tokens, and such trees cannot be merged: set draft_sampling: false"
        if isinstance(own, ModelDrafter) and own.placement == "split":
            return "lives in a process of its own: set placement: same-gpu"
        return None

    @model_validator(mode="after")
    def _keys_differ(self) -> Config:
        seen: dict[str, str] = {}
        for place, key in self._keys():
            if key.sha256 in seen:
                context = {"place": place, "other": seen[key.sha256]}
                raise PydanticCustomError("key", "{place}: the same key as {other}", context)
            seen[key.sha256] = place
        return self

    @model_validator(mode="after")
    def _server_is_complete(self) -> Config:
        server = self.server
        if server.require_api_key and not any(tenant.api_keys for tenant in self.tenants.values()):
            raise PydanticCustomError("keys", "server.require_api_key: no tenant has api_keys")
        if server.protect_metrics and not server.operator_keys:
            raise PydanticCustomError("keys", "server.protect_metrics: there are no server.operator_keys")
        if self.telemetry.log_prompts and server.access_log is None:
            raise PydanticCustomError("log", "telemetry.log_prompts: there is no server.access_log")
        if self.telemetry.prometheus_port == server.port:
            text = (
                "telemetry.prometheus_port: server.port has {port} already; choose another one, or 0 for none"
            )
            raise PydanticCustomError("port", text, {"port": server.port})
        if self.telemetry.trace_ratio and self.telemetry.otlp_endpoint is None:
            raise PydanticCustomError("trace", "telemetry.trace_ratio: there is no telemetry.otlp_endpoint")
        return self

    def _keys(self) -> Iterator[tuple[str, Key]]:
        for name, tenant in self.tenants.items():
            yield from ((f"tenants.{name}.api_keys[{i}]", key) for i, key in enumerate(tenant.api_keys))
        yield from ((f"server.operator_keys[{i}]", key) for i, key in enumerate(self.server.operator_keys))

    def unreachable_tenants(self) -> list[str]:
        """Tenants that no request can belong to (see NO_KEYS)."""
        return [name for name, tenant in self.tenants.items() if name != "default" and not tenant.api_keys]

    def parts(self, drafter: Drafter) -> list[Drafter]:
        """Of a composite, which makes them anew; else the drafter itself."""
        if isinstance(drafter, CompositeDrafter):
            return [self.drafters[name] for name in drafter.drafters]
        return [drafter]

    def drafting_with(self, drafter: str) -> set[str]:
        """Tenants that may draft with it."""
        return {
            name
            for name, tenant in self.tenants.items()
            if tenant.speculation.enabled and drafter in {used for _, used in tenant.named_drafters()}
        }

    def with_server(self, host: str | None, port: int | None) -> Config:
        """This configuration with another address, checked again. Raises ConfigError."""
        given = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
        data = self.model_dump(mode="python")
        return parse({**data, "server": {**data["server"], **given}}, "command line")


EMBEDDED = "smollm2-135m-instruct"
DEFAULT = f"""\
target: {{model: {EMBEDDED}}}
drafters:
  lookup: {{method: ngram, max_ngram: 4, min_ngram: 2}}
tenants:
  default:
    drafter: lookup
    speculation: {{gamma: 8, tree_width: 1}}
"""
# Its head was measured before it came here, so it needs no time on trial.
WITH_HEAD = """\
target: {{model: {model}}}
drafters:
  lookup: {{method: ngram, max_ngram: 4, min_ngram: 2}}
  head: {{method: eagle3, path: {head}, dtype: auto}}
  both: {{method: composite, drafters: [lookup, head]}}
tenants:
  default:
    drafter: both
    fallback_drafter: lookup
    warmup_s: 0
    speculation: {{gamma: 5, tree_width: 2}}
"""


def load(file: str | Path | None = None) -> Config:
    """Reads a YAML file; None gives the embedded default: SmolLM2 with the n-gram drafter, and with the head
    that was made for it where there is one for the installed weights.

    Raises ConfigError for a missing file, bad YAML, a duplicate key, or a key or value that is wrong.
    """
    if file is None:
        head = fitting_head(EMBEDDED)
        text = WITH_HEAD.format(model=EMBEDDED, head=head) if head else DEFAULT
        return parse(read(text, "default"), "default")
    return parse(read_file(Path(file), "configuration"), str(file))


def check_key(name: str, sha256: str) -> Key:
    """An entry of `api_keys`. Raises ConfigError for a name that none can have."""
    try:
        return Key(name=name, sha256=sha256)
    except ValidationError:
        raise ConfigError(f"a key cannot be named {name!r}: use up to 64 of A-Z a-z 0-9 . _ -") from None


def flow(key: Key) -> str:
    """A line of YAML, to be put into `api_keys`."""
    return yaml.safe_dump(key.model_dump(), default_flow_style=True, width=1000, sort_keys=False)


def dump(config: Config) -> str:
    """YAML that `load` turns into the same configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def parse(data: object, source: str) -> Config:
    """Checks a plain tree. Raises ConfigError with one line per fault."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        faults = [_line(e) for e in error.errors(include_url=False)]
        raise ConfigError("\n".join(f"{source}: {fault}" for fault in faults)) from None


def _line(error: Any) -> str:
    location = error["loc"]
    if location[:1] == ("drafters",) and len(location) > 2:  # pydantic puts the union's tag into the path
        error = {**error, "loc": location[:2] + location[3:]}
    if KEY_LISTS & set(location):  # a key may stand where its hash belongs
        error = {**error, "input": None, "ctx": {}}
    where = path(error)
    if not where and not isinstance(error["input"], dict):
        return "expected a mapping with the key 'target'"
    return f"{where}: {explain(error)}".removeprefix(": ")
