"""What `gammaray plan` tells: a plan, and what `gammaray serve` would meet when it carries it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gammaray.cluster.checkpoint import read
from gammaray.cluster.demand import demand
from gammaray.cluster.devices import USABLE
from gammaray.cluster.placement import plan
from gammaray.cluster.plans import Demand, Plan, Unplaced
from gammaray.cluster.reasons import size
from gammaray.cluster.topology import Topology, count
from gammaray.config import Config, Target
from gammaray.errors import ConfigError

OUTLOOK = "a plan for GPUs was never carried out on real ones: see docs/never-run.md"


def forecast(config: Config, nodes: Sequence[Topology], memory: Mapping[str, float]) -> Plan:
    """`memory`: bytes of nodes, by name, for plans without GPUs; what is not in it is not checked.

    Raises ConfigError as `demand` and `plan` do.
    """
    on_gpus = any(node.gpus for node in nodes)
    asked = demand(config, sizes=on_gpus)
    made = plan(nodes, asked)
    return _on_gpus(made, asked, config.target) if on_gpus else _on_cpus(made, config.target, memory)


def _on_gpus(made: Plan, asked: Demand, target: Target) -> Plan:
    """Placement plans for what the engine refuses there in this version, engine/device.py."""
    refused = list(_refused(asked, target))
    if refused:
        return Plan((), tuple(refused), asked.notes)
    return replace(made, notes=(*made.notes, OUTLOOK)) if made.placements else made


def _refused(asked: Demand, target: Target) -> Iterator[Unplaced]:
    whole = size(asked.target.need * target.tensor_parallel / USABLE)
    parallel = f"target.tensor_parallel: 1 and GPUs of at least {whole}, a smaller model"
    needs = {"tensor_parallel": parallel} if target.tensor_parallel > 1 else {}
    needs |= {"deterministic": "target.deterministic: false"} if target.deterministic else {}
    for name, instead in needs.items():
        reason = f"target.{name} works on CPUs only in this version, and `serve` would refuse it on GPUs"
        for replica in range(target.replicas):
            what = f"target {target.model} replica {replica}"
            yield Unplaced(what, reason, f"{instead}, or nodes without GPUs")


def _on_cpus(made: Plan, target: Target, memory: Mapping[str, float]) -> Plan:
    if not memory:
        return made
    try:
        found = read(target.model)
    except ConfigError as error:
        return replace(made, notes=(*made.notes, f"whether memory suffices was not checked: {error.message}"))
    large = tuple(_too_large(made, found.weights(target.dtype), memory))
    notes = (found.note,) if large and found.note else ()
    return replace(made, unplaced=(*made.unplaced, *large), notes=(*made.notes, *notes))


def _too_large(made: Plan, weights: int, memory: Mapping[str, float]) -> Iterator[Unplaced]:
    """Only what is certain: one copy of the weights is more than the node has."""
    replicas = made.replicas()
    for node, number in replicas.items():
        if weights > (has := memory.get(node, weights)):
            yield Unplaced(
                what=f"{count(number, 'replica')} of the target on {node}",
                reason=f"its weights take {size(weights)}, and the node has {size(has)} of memory in all",
                needs="a node with more memory than that and some for KV, a smaller model or target.dtype",
            )
