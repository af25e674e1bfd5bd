"""What is asked of placement, and what it answers: pure values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

Mode = Literal["split", "same-gpu", "in-process"]
Role = Literal["target", "draft"]


@dataclass(frozen=True, slots=True)
class TargetDemand:
    """Bytes are those of one of the `tensor_parallel` GPUs of a replica."""

    model: str
    replicas: int
    tensor_parallel: int
    weights: int  # bytes
    kv: int  # bytes: the least that serves one sequence of full length
    feature_bytes: int = 0  # of one token's hidden state, which head drafters need; 0: unknown
    q_bytes: int = 0  # of one distribution over the whole vocabulary; 0: unknown

    @property
    def need(self) -> int:
        return self.weights + self.kv


@dataclass(frozen=True, slots=True)
class DraftDemand:
    """One tenant's pool of one drafter."""

    tenant: str
    drafter: str
    method: str
    light: bool  # computes nothing on a GPU: always on the CPU of the target's process
    weights: int = 0  # bytes
    kv: int = 0  # bytes: for as many tokens as the target's
    wish: Literal["auto", "split", "same-gpu"] = "auto"
    workers: int = 1
    max_workers: int = 0  # 0: no more than `workers`
    round_bytes: int = 0  # of one request: token ids and truncated q

    @property
    def need(self) -> int:
        return self.weights + self.kv

    @property
    def further(self) -> range:
        """Numbers of the workers that come when the pool grows."""
        return range(self.workers, self.max_workers)


@dataclass(frozen=True, slots=True)
class Demand:
    target: TargetDemand
    drafts: tuple[DraftDemand, ...] = ()
    min_nvlink_version: float = 4.0
    notes: tuple[str, ...] = ()  # what was assumed, e.g. a size read off a name


@dataclass(frozen=True, slots=True)
class Placed:
    """One process's share. A target has no tenant; without GPUs it computes on the CPU."""

    role: Role
    node: str
    gpus: tuple[int, ...]
    mode: Mode
    reason: str
    replica: int | None  # the target, or the one that a draft is near
    tenant: str | None = None
    drafter: str | None = None
    worker: int = 0  # of the pool
    spare: bool = False  # only room for a worker, which comes when the pool grows
    uuids: tuple[str, ...] = ()  # of the GPUs or MIG parts, for CUDA_VISIBLE_DEVICES
    memory_fraction: float | None = None  # of each GPU; None: the CPU


@dataclass(frozen=True, slots=True)
class Unplaced:
    what: str
    reason: str
    needs: str


@dataclass(frozen=True, slots=True)
class Plan:
    placements: tuple[Placed, ...]
    unplaced: tuple[Unplaced, ...] = ()
    notes: tuple[str, ...] = ()

    def replicas(self) -> Counter[str]:
        """How many of the target are on each node."""
        return Counter(placed.node for placed in self.placements if placed.role == "target")
