"""Data parallel training: each process has the whole head and its own batches, and they sum gradients.

Started as `torchrun --nproc-per-node N -m -- gammaray.cli train ...`, which sets the environment that is read
here (without `--` it takes `--run` for one of its own options). The run folder must be one that all of them
see. Proven with two processes over gloo on CPUs; over NCCL on GPUs it has never run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gammaray.errors import ConfigError

PATIENCE = timedelta(days=2)  # the others wait while the first makes the data
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class World:
    """The processes of one training."""

    rank: int = 0
    size: int = 1

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Each becomes the sum over all processes, in place. All of one dtype and device."""
        if self.size == 1:
            return
        flat = torch.cat([x.detach().reshape(-1) for x in tensors])
        dist.all_reduce(flat)
        for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.detach().copy_(part.view_as(x))

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()


ALONE = World()


@contextmanager
def joined(environment: Mapping[str, str] = os.environ) -> Iterator[World]:
    """The world that torchrun describes, or this process alone. Raises ConfigError for half a description.

    With CUDA each process uses the GPU of its LOCAL_RANK.
    """
    if "RANK" not in environment:
        yield ALONE
        return
    if missing := [name for name in NEEDED if name not in environment]:
        raise ConfigError(f"RANK is set, but not {', '.join(missing)}: start it with torchrun")
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(environment.get("LOCAL_RANK", rank)))
    where = f"tcp://{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        yield World(rank, size)
    finally:
        dist.destroy_process_group()
