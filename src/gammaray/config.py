"""The configuration: one frozen tree, read from YAML, checked once.

Every key works. An unknown key is an error that names the nearest one; a key that a later version
will bring is an error that says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from gammaray.errors import ConfigError
from gammaray.types import MAX_TREE_NODES, Verification
from gammaray.validation import Planned, Strict, explain, nearest, path
from gammaray.yamlfile import read

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
METHODS = ("ngram", "model")
NO_KEYS = "no request can reach it: API keys, which tell tenants apart, are not supported yet"
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

    planned: ClassVar[Planned] = _later("tensor_parallel", "deterministic")
    model: str = Field(min_length=1)  # alias, Hugging Face id, local folder, or GGUF file
    dtype: Dtype = "auto"
    max_model_len: int | None = Field(
        default=None, ge=2
    )  # tokens of prompt and output; None: the model's own
    kv: KV = KV()
    max_batch: int = Field(default=64, ge=1)  # sequences that run at once
    token_budget: int | None = Field(default=None, ge=1)  # tokens a step; None: chosen by the engine


class NgramDrafter(Strict):
    """Proposes what followed the last tokens earlier in the same sequence."""

    planned: ClassVar[Planned] = _later("version")
    method: Literal["ngram"]
    max_ngram: int = Field(default=4, ge=1, le=32)
    min_ngram: int = Field(default=2, ge=1, le=32)

    @model_validator(mode="after")
    def _ordered(self) -> NgramDrafter:
        if self.min_ngram > self.max_ngram:
            raise PydanticCustomError("order", "min_ngram must not exceed max_ngram")
        return self


class ModelDrafter(Strict):
    """A smaller model with the target's vocabulary. `draft_sampling`: draw its tokens, else take the best."""

    planned: ClassVar[Planned] = _later("version", "placement", "path")
    method: Literal["model"]
    model: str = Field(min_length=1)
    dtype: Dtype = "auto"
    draft_sampling: bool = False


def _known_method(value: Any) -> Any:
    if isinstance(value, dict) and value.get("method") not in METHODS:
        late = value.get("method") in PLANNED_METHODS
        text = "method {method} is not supported yet" if late else "unknown or missing method {method}"
        context = {"method": repr(value.get("method")), "known": " or ".join(METHODS)}
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


class Tenant(Strict):
    """A line of business. `drafter` names an entry of `drafters`; None decodes plainly."""

    planned: ClassVar[Planned] = _later(
        "api_keys", "fallback_drafter", "pool", "buckets", "limits", "classes", "region", "warmup_s"
    )
    drafter: str | None = None
    speculation: Speculation = Speculation()


class Server(Strict):
    """Where HTTP listens."""

    planned: ClassVar[Planned] = {"require_api_key": (False,)}
    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=1, le=65535)


class Config(Strict):
    """The whole tree. A tenant named `default` is always there; requests without a key are its own."""

    planned: ClassVar[Planned] = _later("placement", "controller", "telemetry")
    target: Target
    drafters: Mapping[str, Drafter] = {}
    tenants: Mapping[str, Tenant] = {}
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

    def unreachable_tenants(self) -> list[str]:
        """Tenants that no request can belong to (see NO_KEYS)."""
        return [name for name in self.tenants if name != "default"]

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
    where = path(error)
    if not where and not isinstance(error["input"], dict):
        return "expected a mapping with the key 'target'"
    return f"{where}: {explain(error)}".removeprefix(": ")
