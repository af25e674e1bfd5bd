"""The application as Serve is told to deploy it, which is how KubeRay's RayService starts gammaray.

`gammaray serve` is the other way: there a process of ours starts Serve and watches over all. Here nobody of
ours is there before Serve, so a steward (steward.py) does what that process would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayTaskError

from gammaray.actors.draft import LinkFactory, local_link
from gammaray.cluster import local, proxy, steward
from gammaray.cluster.app import Entrance, build
from gammaray.cluster.declaration import declaration
from gammaray.cluster.nodes import Probe, on_this_machine
from gammaray.cluster.prepare import usable
from gammaray.config import Config
from gammaray.telemetry import tracing


def application(args: dict[str, Any]) -> serve.Application:
    """What `import_path` names. `args`: see Declaration. Runs in a task of Serve, and may wait there.

    Raises ConfigError when the configuration cannot be served; Serve then tells why in the status of the
    application, which `kubectl describe rayservice` shows.
    """
    return deployed(args)


def deployed(
    args: Mapping[str, Any],
    probe: Probe = usable,
    link_factory: LinkFactory = local_link,
    **factories: Callable[..., Any],
) -> serve.Application:
    """See `application`. `probe` tells a node's topology, `link_factory` is what draft workers run, and
    `factories` are those of `app.build`."""
    ingress = declaration(args).ingress
    try:
        taken: steward.Taken = ray.get(steward.hire().take.remote(args, probe, link_factory))
    except RayTaskError as error:
        raise error.cause from None
    return build(
        taken.config,
        loopback=on_this_machine(),
        layout=taken.layout,
        entrance=Entrance(ingress.replicas, ingress.pool),
        moves=True,
        **factories,
    )


def environment(config: Config) -> dict[str, str]:
    """Variables of every process of Ray, on every node: Serve and its proxies read them when they start."""
    return {
        **local.QUIET,
        **local.SERVE,
        **proxy.environment(config.server),
        **tracing.environment(config.telemetry),
    }
