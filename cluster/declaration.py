"""The arguments of an application that is declared: what stands in a RayService's serveConfigV2."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from gammaray.cluster.keys import with_keys
from gammaray.config import Config, parse
from gammaray.errors import ConfigError
from gammaray.validation import Strict, explain, nearest, path


class Ingress(Strict):
    """Where the ingress and the controller are: on nodes of a pool; None: on the head node."""

    pool: str | None = None
    replicas: int = Field(default=1, ge=1, le=64)


class Declaration(Strict):
    """`pools` tells how many Ray nodes with each label `gammaray/pool` are waited for."""

    config: Mapping[str, Any] = Field(min_length=1)  # as in a file; see configured
    pools: Mapping[str, Annotated[int, Field(ge=0)]] = {}
    ingress: Ingress = Ingress()
    keys: str | None = Field(default=None, min_length=1)  # folder on the head node, see keys.with_keys

    @property
    def computing(self) -> list[str]:
        """Pools that replicas and draft workers are planned for; none: all nodes."""
        return [pool for pool in self.pools if pool != self.ingress.pool] or list(self.pools)

    def configured(self) -> Config:
        """With the keys. Raises ConfigError."""
        config = with_keys(self.config, Path(self.keys)) if self.keys else self.config
        return parse(config, "config")


def declaration(args: Mapping[str, Any]) -> Declaration:
    """Raises ConfigError for anything but the configuration itself."""
    try:
        told = Declaration.model_validate(dict(args))
    except ValidationError as error:
        faults = (f"args.{path(one)}: {explain(one)}" for one in error.errors(include_url=False))
        raise ConfigError("\n".join(faults)) from None
    pool = told.ingress.pool
    if pool is not None and pool not in told.pools:  # Serve would wait for its nodes for ever
        raise ConfigError(f"args.ingress.pool: {pool!r} is none of args.pools{nearest(pool, told.pools)}")
    return told
