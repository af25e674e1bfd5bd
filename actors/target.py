"""The target replica: an engine behind Ray Serve. A plain class; `cluster/app.py` makes it a deployment."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from gammaray.actors.logs import log_beside_serve
from gammaray.actors.loopback import bind_replica_to_loopback
from gammaray.config import Config
from gammaray.engine.threads import compute_with, usable_cores
from gammaray.errors import ReplicaLost
from gammaray.types import GenerateRequest, Health, ModelInfo, TokenChunk


class EngineService(Protocol):
    """What a replica asks of its engine."""

    info: ModelInfo

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Chunks as they come; closing it aborts the request."""
        ...

    def health(self) -> Health:
        """How it is, without waiting for a step."""
        ...

    def check_health(self) -> None:
        """Raises when the engine no longer steps."""
        ...

    def shutdown(self) -> None:
        """Ends the engine's thread, within seconds."""
        ...


EngineFactory = Callable[[Config], EngineService]


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """`threads` None: every usable core of the machine that the replica runs on."""

    threads: int | None = None
    loopback: bool = True  # the cluster is this machine


def local_engine(config: Config) -> EngineService:
    """The engine of this process. Raises ConfigError for a model or drafter that cannot be served."""
    from gammaray.engine.build import build_engine
    from gammaray.engine.service import AsyncEngine

    return AsyncEngine(build_engine(config))


class TargetReplica:
    """Streams token chunks of one engine. Serve cancels a stream when its reader goes away."""

    def __init__(self, config: Config, engine_factory: EngineFactory, settings: ReplicaSettings) -> None:
        log_beside_serve()
        if settings.loopback:
            bind_replica_to_loopback()
        compute_with(settings.threads or usable_cores())
        self._engine = engine_factory(config)

    async def info(self) -> ModelInfo:
        """Raises ReplicaLost when the engine serves nobody any more: Serve takes a while to notice."""
        if (state := self._engine.health().state) != "ok":
            raise ReplicaLost(f"the engine is {state}; its replica will be replaced")
        return self._engine.info

    async def health(self) -> Health:
        return self._engine.health()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        async with aclosing(self._engine.generate(request)) as stream:
            async for chunk in stream:
                yield chunk

    def check_health(self) -> None:
        self._engine.check_health()

    def __del__(self) -> None:
        if hasattr(self, "_engine"):  # not when the factory failed
            self._engine.shutdown()
