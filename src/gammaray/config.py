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

from gammaray.errors import ConfigError
from gammaray.types import MAX_TREE_NODES, Verification
from gammaray.validation import Planned, Strict, explain, nearest, path, shorten
from gammaray.yamlfile import read

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
METHODS = ("ngram", "model")
NO_KEYS = "no request can reach it: it has no api_keys (`gammaray key` makes one)"
KEY_LISTS = {"api_keys", "operator_keys"}  # no value below these is ever shown
PLANNED_METHODS = ("eagle", "eagle2", "eagle3", "medusa", "layerskip", "mamba", "suffix")


def _later(*keys: str) -> Planned:
    return dict.fromkeys(keys, ())


class KV(Strict):
    """The paged KV pool: `num_blocks` exactly, or as many as fit into the share `memory` of what is free."""

    block_size: int = Field(default=16, ge=1, le=1024)  # tokens
    memory: float = Field(default=0.85, gt=0, le=1)
    num_blocks: int | None = Field(default=None, ge=2)
    prefix_cache: bool = True


class Target(Strict):
    """The model whose output distribution is served."""

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

    @model_validator(mode="after")
    def _works_together(self) -> Target:
        if self.deterministic and self.tensor_parallel > 1:
            text = "deterministic does not work with tensor_parallel above 1 yet"
            raise PydanticCustomError("parallel", text)
        return self


class NgramDrafter(Strict):
    """Proposes what followed the last tokens earlier in the same sequence."""

    method: Literal["ngram"]
    version: str = Field(default="1", min_length=1, max_length=64)
    max_ngram: int = Field(default=4, ge=1, le=32)
    min_ngram: int = Field(default=2, ge=1, le=32)

    @model_validator(mode="after")
    def _ordered(self) -> NgramDrafter:
        if self.min_ngram > self.max_ngram:
            raise PydanticCustomError("order", "min_ngram must not exceed max_ngram")
        return self


class ModelDrafter(Strict):
    """A smaller model with the target's vocabulary. `draft_sampling`: draw its tokens, else take the best."""

    planned: ClassVar[Planned] = _later("path")
    method: Literal["model"]
    model: str = Field(min_length=1)
    version: str = Field(default="1", min_length=1, max_length=64)
    dtype: Dtype = "auto"
    draft_sampling: bool = False
    placement: Literal["auto", "split", "same-gpu"] = "auto"  # split: in a process of its own, in any case


def _known_method(value: Any) -> Any:
    if isinstance(value, dict) and value.get("method") not in METHODS:
        late = value.get("method") in PLANNED_METHODS
        text = "method {method} is not supported yet" if late else "unknown or missing method {method}"
        method = value.get("method")
        shown = shorten(ascii(method)) if isinstance(method, str | None) else type(method).__name__
        context = {"method": shown, "known": " or ".join(METHODS)}
        raise PydanticCustomError("method", text + "; use {known}", context)
    return value


Drafter = Annotated[
    NgramDrafter | ModelDrafter, Field(discriminator="method"), BeforeValidator(_known_method)
]


class Speculation(Strict):
    """A tenant's draft shape; requests may ask for less."""

    planned: ClassVar[Planned] = _later(
        "enabled_ratio",
        "adaptive",
        "fallback_on_alpha_below",
        "disable_on_fallback_rate_above",
        "quality_gate",
    )
    enabled: bool = True
    gamma: int = Field(default=4, ge=1, le=16)  # draft depth
    tree_width: int = Field(default=1, ge=1, le=8)  # children a level
    verification: Verification = "coupled"

    @model_validator(mode="after")
    def _fits(self) -> Speculation:
        if self.gamma * self.tree_width > MAX_TREE_NODES:
            text = "gamma * tree_width must be at most {limit} (got {gamma} * {width})"
            context = {"limit": MAX_TREE_NODES, "gamma": self.gamma, "width": self.tree_width}
            raise PydanticCustomError("nodes", text, context)
        return self


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
    """Of one tenant. Every ingress process counts on its own; None: no limit."""

    planned: ClassVar[Planned] = {"tokens_per_day": (None,)}
    requests_per_minute: int | None = Field(default=None, ge=1)
    max_concurrent: int | None = Field(default=None, ge=1)  # requests that are open at once
    max_tokens: int | None = Field(default=None, ge=1)  # of one choice; also the default of its requests


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

    planned: ClassVar[Planned] = _later("fallback_drafter", "buckets", "classes", "region", "warmup_s")
    api_keys: Keys = Field(default_factory=list)
    drafter: str | None = None
    pool: Pool = Pool()
    speculation: Speculation = Speculation()
    limits: Limits = Limits()


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
    """What may be told about requests."""

    planned: ClassVar[Planned] = {"otlp_endpoint": (None,), "prometheus_port": ()}
    log_prompts: bool = False  # prompts and answers in the access log


class Config(Strict):
    """The whole tree. A tenant named `default` is always there; requests without a key are its own."""

    planned: ClassVar[Planned] = _later("controller")
    target: Target
    drafters: Mapping[str, Drafter] = {}
    tenants: Mapping[str, Tenant] = {}
    placement: Placement = Placement()
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
            if tenant.drafter is not None and tenant.drafter not in self.drafters:
                text = "tenants.{name}.drafter: no drafter is named {drafter}{hint}"
                hint = nearest(tenant.drafter, self.drafters)
                context = {"name": name, "drafter": repr(tenant.drafter), "hint": hint}
                raise PydanticCustomError("drafter", text, context)
        return self

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
        return self

    def _keys(self) -> Iterator[tuple[str, Key]]:
        for name, tenant in self.tenants.items():
            yield from ((f"tenants.{name}.api_keys[{i}]", key) for i, key in enumerate(tenant.api_keys))
        yield from ((f"server.operator_keys[{i}]", key) for i, key in enumerate(self.server.operator_keys))

    def unreachable_tenants(self) -> list[str]:
        """Tenants that no request can belong to (see NO_KEYS)."""
        return [name for name, tenant in self.tenants.items() if name != "default" and not tenant.api_keys]

    def drafting_with(self, drafter: str) -> set[str]:
        """Tenants whose own drafter this is."""
        tenants = self.tenants.items()
        return {name for name, tenant in tenants if tenant.drafter == drafter and tenant.speculation.enabled}

    def with_server(self, host: str | None, port: int | None) -> Config:
        """This configuration with another address, checked again. Raises ConfigError."""
        given = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
        data = self.model_dump(mode="python")
        return parse({**data, "server": {**data["server"], **given}}, "command line")


DEFAULT = """\
target: {model: smollm2-135m-instruct}
drafters:
  lookup: {method: ngram, max_ngram: 4, min_ngram: 2}
tenants:
  default:
    drafter: lookup
    speculation: {gamma: 8, tree_width: 1}
"""


def load(file: str | Path | None = None) -> Config:
    """Reads a YAML file; None gives the embedded default (SmolLM2 with the n-gram drafter).

    Raises ConfigError for a missing file, bad YAML, a duplicate key, or a key or value that is wrong.
    """
    if file is None:
        return parse(read(DEFAULT, "default"), "default")
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read configuration {str(file)!r}: {reason}") from None
    return parse(read(text, str(file)), str(file))


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
