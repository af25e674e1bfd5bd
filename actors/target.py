"""The target replica: an engine behind Ray Serve. A plain class; `cluster/app.py` makes it a deployment."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from gammaray.actors.crew import get
from gammaray.actors.fellows import Fellows
from gammaray.actors.keeper import Resolver
from gammaray.actors.labels import NODE
from gammaray.actors.line import RayDesk
from gammaray.actors.logs import log_beside_serve
from gammaray.actors.loopback import bind_replica_to_loopback
from gammaray.actors.metrics import session_folder
from gammaray.actors.place import Place, cap_memory, check_place, leave_no_core, occupy, whereabouts
from gammaray.actors.pool import Pool
from gammaray.actors.reporter import Reporter, ReportingThread
from gammaray.config import Config
from gammaray.engine.discreet import described
from gammaray.engine.threads import compute_with
from gammaray.errors import EngineFailure, GammarayError, ReplicaLost
from gammaray.routing.bulletin import Origin
from gammaray.telemetry.replica import ReplicaTelemetry
from gammaray.types import GenerateRequest, Health, ModelInfo, PolicySnapshot, StepReport, TokenChunk

if TYPE_CHECKING:
    from gammaray.actors.link.pool import Member
    from gammaray.engine.ranks import Seat


log = logging.getLogger(__name__)

SLOTS = b"gammaray slots"  # in Ray's KV: by number, of replicas that may move


class EngineService(Protocol):
    """What a replica asks of its engine."""

    info: ModelInfo
    projection: NDArray[np.float16] | None  # see ModelRunner

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Chunks as they come; closing it aborts the request."""
        ...

    def apply(self, policy: PolicySnapshot) -> None:
        """Use this policy from the next step on."""
        ...

    async def profile(self, steps: int, timeout_s: float) -> str:
        """Captures the next steps with torch's profiler, and tells the file. Raises Overloaded."""
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


@dataclass(frozen=True, slots=True)
class Slot:
    """What the plan says of one replica."""

    number: int = 0
    place: Place = field(default_factory=Place)
    fellows: tuple[Place, ...] = ()  # the other ranks, when several processes share the weights
    pools: frozenset[Pool] = frozenset()  # tenant and drafter, of those that have draft workers


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What there is beside an engine's own process."""

    seat: Seat | None = None  # of rank 0, when there are other ranks
    pools: frozenset[Pool] = frozenset()
    resolve: Callable[[str, str], list[Member]] | None = None  # the workers of a pool, now
    listener: Callable[[StepReport], None] = lambda report: None  # of every step


EngineFactory = Callable[[Config, Surroundings], EngineService]


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """`threads` None: every usable core of the machine that the replica runs on."""

    threads: int | None = None
    loopback: bool = True  # the cluster is this machine
    slot: Slot = field(default_factory=Slot)
    moves: bool = False  # the slot may have moved since: the newest is in Ray's KV


def here_and_now(settings: ReplicaSettings) -> Slot:
    """The slot of a replica that starts."""
    slots: Mapping[int, Slot] = (get(SLOTS) if settings.moves else None) or {}
    return slots.get(settings.slot.number, settings.slot)


def local_engine(config: Config, around: Surroundings = Surroundings()) -> EngineService:
    """The engine of this process. Raises ConfigError for a model or drafter that cannot be served."""
    from gammaray.actors.admission import admit
    from gammaray.actors.reach import reach
    from gammaray.engine.build import build_engine
    from gammaray.engine.service import AsyncEngine

    admit(config)
    pools = reach(around.pools, around.resolve)
    engine = build_engine(config, ranks=around.seat, pools=pools.drafters)
    projection = engine.runner.projection() if config.controller.predictor else None
    return AsyncEngine(engine, around.listener, links=pools.links, projection=projection)


class TargetReplica:
    """Streams token chunks of one engine. Serve cancels a stream when its reader goes away."""

    def __init__(self, config: Config, engine_factory: EngineFactory, settings: ReplicaSettings) -> None:
        log_beside_serve()
        if settings.loopback:
            bind_replica_to_loopback()
        slot = here_and_now(settings)
        compute_with(slot.place.threads(settings.threads))
        check_place(slot.place)
        devices = {name for place in (slot.place, *slot.fellows) for name in place.devices}
        self._devices = occupy(devices, session_folder()) if devices else []
        cap_memory(slot.place)
        leave_no_core()
        self._fellows = Fellows(config, slot.fellows, settings.threads) if slot.fellows else None
        self._telemetry = ReplicaTelemetry(config, f"target-{slot.number}", session_folder())
        self._engine: EngineService
        reporter = self._reporter(config, slot) if config.controller.enabled else None
        self._engine = engine_factory(config, self._around(slot, reporter))
        self._reporting = ReportingThread(reporter) if reporter else None

    def _around(self, slot: Slot, reporter: Reporter | None) -> Surroundings:
        listeners = [self._telemetry.record, *([reporter.add] if reporter else [])]

        def tell(report: StepReport) -> None:
            for listener in listeners:
                listener(report)

        seat = self._fellows.seat if self._fellows else None
        return Surroundings(seat, slot.pools, Resolver(slot.number) if slot.pools else None, tell)

    def _apply(self, policy: PolicySnapshot) -> None:
        self._engine.apply(policy)
        self._telemetry.apply(policy)

    def _reporter(self, config: Config, slot: Slot) -> Reporter:
        """To the controller, from the engine that there will be."""
        here = whereabouts()
        source = f"{slot.number}-{secrets.token_hex(4)}"
        origin = Origin(source, here.labels.get(NODE, here.node), here.devices)
        return Reporter(
            origin,
            RayDesk(),
            self._apply,
            lambda: self._engine.health().links,
            config.controller.interval_s,
        )

    async def info(self) -> ModelInfo:
        """Raises ReplicaLost when the engine serves nobody any more: Serve takes a while to notice."""
        if (state := self._engine.health().state) != "ok":
            raise ReplicaLost(f"the engine is {state}; its replica will be replaced")
        return self._engine.info

    async def health(self) -> Health:
        return self._engine.health()

    async def projection(self) -> NDArray[np.float16] | None:
        """What the acceptance predictor reads of each token; None: nothing."""
        return self._engine.projection

    async def profile(self, steps: int, timeout_s: float) -> str:
        return await self._engine.profile(steps, timeout_s)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Serve writes the message of what is raised here into its logs and spans: only our own errors, which
        hold no tokens, leave as they are."""
        try:
            async with aclosing(self._engine.generate(request)) as stream:
                async for chunk in stream:
                    yield chunk
        except GammarayError:
            raise
        except Exception as error:
            log.error("a stream failed (%s)\n%s", *described(error))
            raise EngineFailure(f"the engine failed: {type(error).__name__}") from None

    def check_health(self) -> None:
        if self._fellows:
            self._fellows.check()
        self._engine.check_health()

    def __del__(self) -> None:
        if hasattr(self, "_reporting"):  # not when the factory failed
            self._engine.shutdown()
            if self._reporting:
                self._reporting.stop()
            self._telemetry.close()
