"""Wires the deployments of one Serve application: ingress -> target."""

from __future__ import annotations

from ray import serve

from gammaray.actors.target import EngineFactory, ReplicaSettings, TargetReplica, local_engine
from gammaray.cluster.ingress import Ingress, TokenizerFactory, local_tokenizer
from gammaray.cluster.stop import drain_limit
from gammaray.config import Config
from gammaray.engine.threads import asked_threads

MAX_STREAMS = 1000  # per replica; beyond it Serve queues, the engine has a queue of its own before that
HEALTH_PERIOD_S = 2.0  # Serve replaces a replica after three failed checks


def build(
    config: Config,
    *,
    loopback: bool,
    engine_factory: EngineFactory = local_engine,
    tokenizer_factory: TokenizerFactory = local_tokenizer,
) -> serve.Application:
    """The application, for `serve.run` on the Ray cluster that this process is connected to.

    `loopback`: the cluster is this machine and nothing may listen elsewhere. The factories run in the
    replicas; both deployments start at the same time.
    """
    settings = ReplicaSettings(asked_threads(), loopback)
    drain_s = drain_limit(config.server)
    target = deployment(TargetReplica, "target", drain_s, num_cpus=1)
    ingress = deployment(serve.ingress()(Ingress), "ingress", drain_s, num_cpus=0)
    replica = target.bind(config, engine_factory, settings)
    return ingress.bind(replica, config, tokenizer_factory, loopback)


def deployment(cls: type, name: str, drain_s: float, **resources: float) -> serve.Deployment:
    """`drain_s`: what a replica that is to stop may still take for its open requests."""
    deploy = serve.deployment(
        name=name,
        max_ongoing_requests=MAX_STREAMS,
        max_constructor_retry_count=1,  # a model that does not load will not load the next time
        graceful_shutdown_timeout_s=drain_s,
        health_check_period_s=HEALTH_PERIOD_S,
        ray_actor_options=resources,
    )
    return deploy(cls)
