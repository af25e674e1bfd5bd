"""Wires the deployments of one Serve application: ingress -> the replicas of the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray import serve

from gammaray.actors.place import Place, housed
from gammaray.actors.pool import Pool
from gammaray.actors.target import EngineFactory, ReplicaSettings, Slot, TargetReplica, local_engine
from gammaray.cluster.ingress import Ingress, TokenizerFactory, local_tokenizer
from gammaray.cluster.layout import DEFAULT, Layout
from gammaray.cluster.run import QUIET
from gammaray.cluster.stop import drain_limit
from gammaray.config import Config
from gammaray.engine.threads import asked_threads

MAX_STREAMS = 1000  # per replica; beyond it Serve queues, the engine has a queue of its own before that
HEALTH_PERIOD_S = 2.0  # Serve replaces a replica after three failed checks


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where the ingress is. Streams end with its node; when another one is lost, replicas elsewhere go on."""

    replicas: int = 1
    pool: str | None = None  # of nodes; None: the head node


def build(
    config: Config,
    *,
    loopback: bool,
    layout: Layout = DEFAULT,
    entrance: Entrance = Entrance(),
    moves: bool = False,
    engine_factory: EngineFactory = local_engine,
    tokenizer_factory: TokenizerFactory = local_tokenizer,
) -> serve.Application:
    """The application, for `serve.run` on the Ray cluster that this process is connected to.

    `loopback`: the cluster is this machine and nothing may listen elsewhere. The factories run in the
    replicas; all deployments start at the same time. Each replica of the target is a deployment of its own,
    as Serve knows no other way to give each its own node and devices. `moves`: see ReplicaSettings.
    """
    drain_s, threads = drain_limit(config.server), asked_threads()
    replicas = []
    for slot in layout.slots:
        target = deployment(TargetReplica, name_of(slot, layout), drain_s, **actor_options(slot))
        replicas.append(target.bind(config, engine_factory, ReplicaSettings(threads, loopback, slot, moves)))
    house = {"num_cpus": 0, **housed(entrance.pool)}
    ingress = deployment(serve.ingress()(Ingress), "ingress", drain_s, entrance.replicas, **house)
    pools = frozenset[Pool]().union(*(slot.pools for slot in layout.slots))
    return ingress.bind(replicas, config, tokenizer_factory, loopback, pools)


def name_of(slot: Slot, layout: Layout) -> str:
    """Of its deployment."""
    return "target" if len(layout.slots) == 1 else f"target-{slot.number}"


def actor_options(slot: Slot) -> dict[str, Any]:
    """Of its replica. A slot that may be anywhere says nothing of where: Serve starts it as ever."""
    return {"num_cpus": 1, **(slot.place.options() if slot.place != Place() else {})}


def deployment(cls: type, name: str, drain_s: float, replicas: int = 1, **options: Any) -> serve.Deployment:
    """`drain_s`: what a replica that is to stop may still take for its open requests."""
    deploy = serve.deployment(
        name=name,
        num_replicas=replicas,
        logging_config=QUIET,
        max_ongoing_requests=MAX_STREAMS,
        max_constructor_retry_count=1,  # a model that does not load will not load the next time
        graceful_shutdown_timeout_s=drain_s,
        health_check_period_s=HEALTH_PERIOD_S,
        ray_actor_options=options,
    )
    return deploy(cls)
