"""Groups of processes that exchange tensors, over torch.distributed's own process groups.

Not over its one global group: a target may be a rank of its tensor-parallel group and at the same time an end
of several draft links. gloo is what runs on CPUs; nccl has the same calls and never ran here.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor

from gammaray.errors import ConfigError

# Of a collective in a step: every rank computes as much, so none waits longer than a layer takes.
TIMEOUT_S = 30.0
START_S = 600.0  # until all ranks are there, and have read their weights
FOREVER_S = 10 * 365 * 86400.0  # who is idle sends nothing, and who is gone is noticed at once
LOOPBACK = "127.0.0.1"

c10d: Any = torch.distributed  # its process groups and stores have no types

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one incarnation find each other. Plain data, to be handed to each of them."""

    host: str  # an address of rank 0's machine that all ranks reach
    port: int  # of rank 0's store
    size: int
    generation: int  # who comes with another one waits in vain
    backend: Backend = "gloo"
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place at a meeting."""

    meeting: Meeting
    rank: int
    store: Any

    def group(self, name: str, backend: Backend = "gloo") -> Group:
        """Waits, START_S at most, until all ranks ask for the group of this name. Raises ConnectionError."""
        store = c10d.PrefixStore(f"{self.meeting.generation}/{name}", self.store)
        make = _nccl if backend == "nccl" else _gloo
        try:
            made = make(store, self.rank, self.meeting)
        except RuntimeError as error:
            raise ConnectionError(f"the ranks did not meet: {str(error)[:200]}") from error
        return Group(made, self.rank, self.meeting.size)


def host(
    size: int,
    address: str = LOOPBACK,
    generation: int | None = None,
    backend: Backend = "gloo",
    timeout_s: float = TIMEOUT_S,
) -> Seat:
    """Open a meeting as rank 0, listening on `address` only. `generation` None: one never used before."""
    listener = socket.create_server((address, 0), backlog=size)
    port = int(listener.getsockname()[1])
    store = c10d.TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=START_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    generation = secrets.randbits(48) if generation is None else generation
    return Seat(Meeting(address, port, size, generation, backend, timeout_s), 0, store)


def join(meeting: Meeting, rank: int) -> Seat:
    """Come to a meeting that rank 0 has opened. Raises ConnectionError when it is not there."""
    timeout = timedelta(seconds=START_S)
    try:
        store = c10d.TCPStore(
            meeting.host, meeting.port, is_master=False, timeout=timeout, wait_for_workers=False
        )
    except RuntimeError as error:
        raise ConnectionError(f"rank 0 is not at {meeting.host}:{meeting.port}: {error}") from error
    return Seat(meeting, rank, store)


class Group:
    """Collectives of all ranks, and messages between two.

    Tensors are contiguous. A rank that is gone, or is late by the patience (at first START_S), is a
    ConnectionError, and the group is of no use after it.
    """

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._backend = backend
        self._patience = timedelta(seconds=START_S)

    def close(self) -> None:
        """Drop the connections; there must be no call after it."""
        self._backend = None

    def set_patience(self, seconds: float) -> None:
        self._patience = timedelta(seconds=seconds)
        self._backend._set_default_timeout(self._patience)

    def all_reduce(self, x: Tensor) -> Tensor:
        """`x` becomes the sum of all ranks' x, with the same bits on each."""
        _wait(lambda: self._backend.allreduce([x]))
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """`x` becomes that of rank 0."""
        _wait(lambda: self._backend.broadcast([x]))
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, all of one shape, in the order of ranks."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        _wait(lambda: self._backend.allgather([parts], [x]))
        return parts

    def send(self, x: Tensor, peer: int) -> None:
        _wait(lambda: self._backend.send([x], peer, 0), self._patience)

    def receive(self, x: Tensor, peer: int) -> Tensor:
        """Fill `x`, which has the size of what the peer sends."""
        _wait(lambda: self._backend.recv([x], peer, 0), self._patience)
        return x


def _wait(begin: Callable[[], Any], *timeout: timedelta) -> None:
    """Collectives keep to the group's timeout, messages between two must be told theirs."""
    try:
        begin().wait(*timeout)
    except RuntimeError as error:
        raise ConnectionError(f"another rank is gone or stuck: {str(error)[:200]}") from error


def _gloo(store: Any, rank: int, meeting: Meeting) -> Any:
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=START_S)
    options._threads = 1
    options._devices = [gloo.create_device(hostname=_own_address(meeting))]
    return gloo(store, rank, meeting.size, options)


def _nccl(store: Any, rank: int, meeting: Meeting) -> Any:
    if not c10d.is_nccl_available():
        raise ConfigError("this torch comes without NCCL: use the backend 'gloo'")
    nccl: Any = c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=START_S)
    return nccl(store, rank, meeting.size, options)


def _own_address(meeting: Meeting) -> str:
    """The address under which rank 0's machine sees this one; gloo listens on it and on no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((meeting.host, meeting.port))  # sends nothing
        return str(probe.getsockname()[0])
