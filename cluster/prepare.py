"""What a configuration becomes on the nodes of the Ray cluster that this process is connected to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from gammaray.cluster.demand import demand
from gammaray.cluster.layout import DEFAULT, Layout, layout
from gammaray.cluster.nodes import Node, Probe, nodes, on_this_machine, topologies
from gammaray.cluster.placement import plan
from gammaray.cluster.topology import Topology
from gammaray.config import Config
from gammaray.drafter_config import ModelDrafter
from gammaray.errors import ConfigError, GammarayError

NO_CUDA = "torch cannot use CUDA here, so its GPUs are not used"


def prepare(
    config: Config, probe: Probe | None, say: Callable[[str], None], pools: Collection[str] = ()
) -> tuple[Layout, Sequence[Node]]:
    """The layout, and the nodes that it is for. Raises ConfigError when something has no place.

    `probe` tells a node's topology; without one, NVML does, and GPUs that it finds are only mentioned where
    this process's torch cannot use CUDA. `pools`: see `nodes`.
    """
    unused = probe is None and not _cuda()
    if unused and nothing_to_decide(config):
        if on_this_machine():
            _without_gpus(_nvml(), say)
        return DEFAULT, ()
    among = nodes(pools)
    found = topologies(probe or _nvml, among)
    if not found:
        raise GammarayError("no node of the Ray cluster can hold a replica: none has a CPU and answers")
    if unused:
        found = [(node, _without_gpus(topology, say)) for node, topology in found]
    asked = demand(config, sizes=any(topology.gpus for _, topology in found))
    return layout(plan([topology for _, topology in found], asked), config, found), among


def nothing_to_decide(config: Config) -> bool:
    """One process, which may be anywhere."""
    drafters = [config.drafters[t.drafter] for t in config.tenants.values() if t.drafter is not None]
    split = any(isinstance(d, ModelDrafter) and d.placement == "split" for d in drafters)
    return config.target.replicas == config.target.tensor_parallel == 1 and not split


def usable() -> Topology:
    """What a node of a pool is asked. Raises ConfigError when its torch cannot use the GPUs that it has."""
    topology = _nvml()
    if topology.gpus and not _cuda():
        count = len(topology.gpus)
        raise ConfigError(f"torch cannot use CUDA on its {count} GPUs: does its image have the CUDA build?")
    return topology


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _nvml() -> Topology:
    from gammaray.cluster import nvml

    return nvml.probe()


def _without_gpus(topology: Topology, say: Callable[[str], None]) -> Topology:
    if topology.gpus:
        count = len(topology.gpus)
        say(f"node {topology.node} has {count} GPU{'s' if count > 1 else ''}: {NO_CUDA}")
    return replace(topology, gpus=(), joins={})
