"""The HTTP ingress: FastAPI over the target's replicas. A plain class; `app.py` makes it a deployment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray
from ray.serve.handle import DeploymentHandle

from gammaray.actors.briefer import Briefer, follow
from gammaray.actors.client import RayEngineClient
from gammaray.actors.line import RayDesk
from gammaray.actors.logs import log_beside_serve
from gammaray.actors.loopback import bind_replica_to_loopback
from gammaray.actors.metrics import session_folder
from gammaray.actors.operations import RayOperations
from gammaray.actors.place import leave_no_core
from gammaray.actors.pool import Pool
from gammaray.actors.spread import SpreadClient
from gammaray.api.app import create_app
from gammaray.api.client import Tokenizer
from gammaray.api.drain import Drain, EndingClient
from gammaray.api.resume import ResumingClient
from gammaray.api.tenancy import Tenancy
from gammaray.config import Config
from gammaray.routing.plan import Router
from gammaray.routing.warmup import conversations
from gammaray.telemetry.ingress import IngressRecorder
from gammaray.telemetry.meters import open_meters
from gammaray.telemetry.sockets import gather

PROJECTION_S = 5.0
TokenizerFactory = Callable[[str], Tokenizer]


def local_tokenizer(model: str) -> Tokenizer:
    """The checkpoint's own tokenizer. Raises ConfigError when there is none."""
    from gammaray.engine.loading import load_tokenizer

    return cast(Tokenizer, load_tokenizer(model))


def embeddings(target: DeploymentHandle[Any]) -> NDArray[np.float16] | None:
    """As the replica gives them; None while it does not."""
    try:
        table: NDArray[np.float16] | None = target.projection.remote().result(timeout_s=PROJECTION_S)
    except Exception:  # it still starts, or has none
        return None
    return table


class Ingress:
    """Starts while the target still loads: requests wait for it, `/readyz` says 503."""

    def __init__(
        self,
        targets: Sequence[DeploymentHandle[Any]],
        config: Config,
        tokenizer_factory: TokenizerFactory,
        loopback: bool,
        pools: frozenset[Pool] = frozenset(),
    ) -> None:
        """`pools`: tenants and drafters that draft workers serve."""
        log_beside_serve()
        if loopback:
            bind_replica_to_loopback()
        leave_no_core()
        self._config, self._pools, self._drain = config, pools, Drain()
        self._targets = targets
        clients = [RayEngineClient(target) for target in targets]
        client = SpreadClient(clients) if len(clients) > 1 else clients[0]
        self._client = EndingClient(ResumingClient(client), self._drain)
        self._tokenizer = tokenizer_factory(config.target.model)

    def __serve_build_asgi_app__(self) -> FastAPI:
        config, folder = self._config, session_folder()
        router, tenancy = Router(config, self._pools), Tenancy(config)
        if config.controller.enabled:
            follow(Briefer(RayDesk(), router.brief, tenancy, partial(embeddings, self._targets[0])))
        meters = open_meters(config, "ingress", folder)
        recorder = IngressRecorder(meters, config.telemetry.tenants, lambda: self._drain.open)
        return create_app(
            self._client,
            self._tokenizer,
            router,
            config,
            self._drain,
            tell_ids=False,  # Serve's proxy does
            tenancy=tenancy,
            operations=RayOperations(self._targets),
            metrics=partial(gather, folder),
            tell=recorder.record,
            conversations=lambda count, seed: [one.messages for one in conversations(count, seed)],
        )

    async def drain(self) -> int:
        """Takes no new requests from now on; returns how many are open."""
        self._drain.close()
        return self._drain.open

    async def cut(self) -> None:
        """Ends the open ones with an error."""
        self._drain.cut()
