"""What a release of the chart would place, before anyone installs it: its values become a plan."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gammaray.cluster.chart_pools import Pod, assumption, parse, pods
from gammaray.cluster.chart_values import Values, merged, over
from gammaray.cluster.forecast import forecast
from gammaray.cluster.keys import added
from gammaray.cluster.plans import Plan, Unplaced
from gammaray.cluster.topology import count
from gammaray.config import Config
from gammaray.config import parse as parse_config
from gammaray.errors import ConfigError
from gammaray.validation import nearest
from gammaray.yamlfile import mapping


@dataclass(frozen=True, slots=True)
class Release:
    config: Config
    pods: tuple[Pod, ...]
    notes: tuple[str, ...] = ()


def plan_values(files: Sequence[Path], topologies: Sequence[str] = ()) -> Plan:
    """Of values files, later ones over earlier ones. `topologies`: POOL=FILE each.

    Raises ConfigError for values that cannot be read, and for a configuration that cannot be served.
    """
    asked = release(merged(files), dict(map(_pair, topologies)))
    memory = {pod.topology.node: pod.memory for pod in asked.pods if pod.memory is not None}
    made = forecast(asked.config, [pod.topology for pod in asked.pods], memory)
    unplaced = (*made.unplaced, *_without_cpus(made, asked.pods))
    return replace(made, unplaced=unplaced, notes=(*asked.notes, *made.notes, *_idle(made, asked.pods)))


def release(values: Values, files: Mapping[str, Path]) -> Release:
    """Raises ConfigError; see `plan_values`. `files`: saved topologies by pool."""
    shared = mapping(values.get("poolDefaults"), "poolDefaults")
    entries = mapping(values.get("pools"), "pools")
    own = {name: mapping(entry, f"pools.{name}") for name, entry in entries.items()}
    autoscaled = bool(mapping(values.get("autoscaling") or {}, "autoscaling").get("enabled"))
    pools = {name: parse(name, _lasting(over(shared, entry), autoscaled)) for name, entry in own.items()}
    for name in files.keys() - pools.keys():
        raise ConfigError(f"--topology {name}=...: no pool is named {name!r}{nearest(name, pools)}")
    found = [pod for name, pool in pools.items() for pod in pods(name, pool, files.get(name))]
    if not found:
        raise ConfigError("pools: there is no pod that could hold a replica")
    notes = [assumption(name, pool) for name, pool in pools.items() if name not in files]
    config = parse_config(_with_keys(values), "values: config")
    return Release(config, tuple(found), tuple(note for note in notes if note))


def _lasting(pool: Values, autoscaled: bool) -> Values:
    """As in the chart: what is above minReplicas the autoscaler may take away, so no plan counts on it."""
    least = pool.get("minReplicas") if autoscaled else None
    return pool if least is None else {**pool, "replicas": least}


def _pair(text: str) -> tuple[str, Path]:
    pool, equals, file = text.partition("=")
    if not equals:
        raise ConfigError(f"--topology: with --values expected POOL=FILE (got {text!r})")
    return pool, Path(file)


def _with_keys(values: Values) -> Values:
    """The configuration with a key in place of each Secret, whose content nobody has to know here."""
    config = mapping(values.get("config"), "config")
    keys = mapping(values.get("keys") or {}, "keys")
    tenants = {"default": {}, **mapping(config.get("tenants") or {}, "config.tenants")}
    for name in mapping(keys.get("tenants") or {}, "keys.tenants"):
        if name not in tenants:
            raise ConfigError(f"keys.tenants.{name}: no tenant has this name{nearest(name, tenants)}")
        tenants[name] = added(tenants[name], f"config.tenants.{name}", "api_keys", [_stand_in(name)])
    config = {**config, "tenants": tenants}
    if mapping(keys.get("operator") or {}, "keys.operator").get("existingSecret"):
        config["server"] = added(config.get("server"), "config.server", "operator_keys", [_stand_in("")])
    return config


def _stand_in(tenant: str) -> Values:
    """For the keys of a tenant's Secret, or of the operators'; no two are the same."""
    return {"name": "from-a-secret", "sha256": hashlib.sha256(tenant.encode()).hexdigest()}


def _without_cpus(made: Plan, among: Sequence[Pod]) -> Iterator[Unplaced]:
    """Ray counts one CPU for each replica, and starts none where it has counted all."""
    replicas = made.replicas()
    for pod in among:
        node, cpus = pod.topology.node, pod.cpus
        if cpus is not None and replicas[node] > math.ceil(cpus):
            yield Unplaced(
                what=f"{count(replicas[node], 'replica')} of the target on {node}",
                reason=f"each takes a CPU, and a pod of pool {pod.pool} has {cpus:g}",
                needs=f"pools.{pod.pool}.resources.cpu of {replicas[node]} at least",
            )


def _idle(made: Plan, among: Sequence[Pod]) -> Iterator[str]:
    """Pools that would be paid for in vain, in whole or in part."""
    held = {(placed.node, gpu) for placed in made.placements for gpu in placed.gpus}
    used = {placed.node for placed in made.placements}
    for name in dict.fromkeys(pod.pool for pod in among):
        nodes = [pod.topology for pod in among if pod.pool == name]
        gpus = [(node.node, gpu.index) for node in nodes for gpu in node.gpus]
        if not used & {node.node for node in nodes}:
            yield f"pool {name}: nothing is placed on its {count(len(nodes), 'pod')}"
        elif free := len(gpus) - len(held & set(gpus)):
            yield f"pool {name}: {free} of {count(len(gpus), 'GPU')} hold nothing"
