"""Windows as replicas would tell them, of made-up traffic with exactly known acceptance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gammaray.routing.window import COLUMN, VECTOR, WIDTH, Counts, Window
from gammaray.types import DraftLinks, Key


@dataclass(frozen=True)
class Traffic:
    """One key in a tick: chains of `gamma` tokens, each accepted with chance `alpha`, at `cost` T_AR."""

    rounds: int = 200
    alpha: float = 0.7
    gamma: int = 4
    cost: float = 0.05
    planned: int = 50
    fallbacks: int = 0
    lost: int = 0  # ... of the planned ones, for want of a worker


def row(traffic: Traffic) -> Counts:
    """[WIDTH]"""
    counts, rounds = np.zeros(WIDTH), float(traffic.rounds)
    reached = rounds * traffic.alpha ** np.arange(traffic.gamma + 1)  # [j]: rounds that accepted j or more
    lengths = np.append(-np.diff(reached), reached[-1])  # rounds that accepted exactly j
    emitted = np.arange(1, traffic.gamma + 2)
    scalars = {
        "rounds": rounds,
        "drafted": rounds * traffic.gamma,
        "verified": rounds * traffic.gamma,
        "levels": rounds * traffic.gamma,
        "accepted": reached[1:].sum(),
        "emitted": (lengths * emitted).sum(),
        "emitted_squared": (lengths * emitted**2).sum(),
        "tested": reached[:-1].sum(),
        "first_accepted": reached[1:].sum(),
        "base_s": 0.02 * rounds,
        "extra_s": 0.02 * rounds * traffic.gamma * traffic.cost,
        "planned": traffic.planned,
        "finished": traffic.planned,
        "low_acceptance": traffic.fallbacks,
        "worker_lost": traffic.lost,
    }
    for name, value in scalars.items():
        counts[COLUMN[name]] = value
    for name, values in {"level_tested": reached[:-1], "level_first": reached[1:]}.items():
        counts[VECTOR[name]][: traffic.gamma] = values
    counts[VECTOR["level_accepted"]][: traffic.gamma] = reached[1:]
    counts[VECTOR["ranks"]][0] = reached[1:].sum()
    return counts


def window(
    number: int,
    traffic: Mapping[Key, Traffic],
    source: str = "replica-0",
    links: tuple[DraftLinks, ...] = (),
    running: int = 8,
) -> Window:
    counts = np.array([row(one) for one in traffic.values()]).reshape(len(traffic), WIDTH)
    return Window(source, number, tuple(traffic), counts, links=links, running=running)
