"""Deploys an application as KubeRay's operator does, on raylets that stand for pods.

Processes of Ray import this module: GAMMARAY_TEST_LOG names the file that engines write to.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve

from gammaray.actors.draft import Link
from gammaray.cluster import service
from gammaray.config import Config
from gammaray.errors import ConfigError
from gammaray.types import GenerateRequest
from support import raylets, serving

LOG = "GAMMARAY_TEST_LOG"
UNFIT = 666  # server.max_body_bytes with which no draft worker starts
GO = "go"  # a file beside the log
TESTS = str(Path(__file__).parents[1])
PODS = {"a": range(2), "b": range(2), "c": range(4, 6)}  # their GPUs, of which each pair is linked
MACHINES = {name: raylets.narrowed(raylets.machine(), name, gpus) for name, gpus in PODS.items()}


class HeldUp(serving.PlacedEngine):
    """The request with the seed 7 waits before its fourth word until somebody lets it go on."""

    async def _rounds(self, request: GenerateRequest) -> AsyncGenerator[int, None]:
        async for number in super()._rounds(request):
            while number == 3 and request.sampling.seed == 7 and not self.log.with_name(GO).exists():
                await asyncio.sleep(0.05)
            yield number


def link(config: Config, drafter: str) -> Link:
    """What draft workers run."""
    if config.server.max_body_bytes == UNFIT:
        raise ConfigError("the drafter does not fit")
    return serving.IdleLink(drafter)


def application(args: dict[str, Any]) -> serve.Application:
    """What is deployed in place of `gammaray.cluster.service:application`."""
    log = Path(os.environ[LOG])
    return service.deployed(
        args,
        probe=partial(raylets.probe_by_label, MACHINES),
        link_factory=link,
        engine_factory=lambda config, *around: HeldUp(log, *around),
        tokenizer_factory=lambda _: serving.ByteTokenizer(),
    )


def deploy(config: dict[str, Any]) -> None:
    """What Ray's dashboard does with a PUT of serveConfigV2."""
    from ray.serve._private.api import serve_start
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(config)
    client = serve_start(
        http_options=schema.http_options.model_dump(),
        proxy_location=schema.proxy_location,
        global_logging_config=schema.logging_config,
    )
    client.deploy_apps(schema)


def leave() -> None:
    """This process is in no Ray cluster any more, and can be in another one."""
    serve.shutdown()  # which also forgets its client
    ray.shutdown()


def ready(url: str) -> bool:
    """Whether the application answers. Fails the test when it never will."""
    app = serve.status().applications["gammaray"]
    assert app.status != "DEPLOY_FAILED", app
    try:
        return app.status == "RUNNING" and httpx.get(f"{url}/readyz", timeout=10).status_code == 200
    except httpx.TransportError:
        return False
