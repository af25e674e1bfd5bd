"""Wires the deployments of one Serve application: ingress -> target."""

from __future__ import annotations

from ray import serve

from gammaray.actors.target import EngineFactory, ReplicaSettings, TargetReplica, local_engine
from gammaray.cluster.ingress import Ingress, TokenizerFactory, local_tokenizer
from gammaray.config import Config
from gammaray.engine.threads import asked_threads

MAX_STREAMS = 1000  # per replica; beyond it Serve queues, the engine has a queue of its own before that
DRAIN_S = 10.0


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
    target = _deployment(TargetReplica, "target", num_cpus=1)
    ingress = _deployment(serve.ingress()(Ingress), "ingress", num_cpus=0)
    replica = target.bind(config, engine_factory, settings)
    return ingress.bind(replica, config, tokenizer_factory, loopback)


def _deployment(cls: type, name: str, **resources: float) -> serve.Deployment:
    deploy = serve.deployment(
        name=name,
        max_ongoing_requests=MAX_STREAMS,
        max_constructor_retry_count=1,  # a model that does not load will not load the next time
        graceful_shutdown_timeout_s=DRAIN_S,
        ray_actor_options=resources,
    )
    return deploy(cls)
