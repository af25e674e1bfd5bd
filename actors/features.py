"""The draft link's `device` transport: what is too large for a socket, from a target to a draft worker.

A group of two over torch.distributed, for one incarnation of both ends: gloo between processes, nccl between
GPUs (where it never ran). The target is rank 0. Buffers are made once, for the largest message; a message is
a header of fixed shape, then as many rows of the buffer as it has, since a round of a few sequences must not
pay for the largest one. A peer that is gone is a ConnectionError at once, and so is a worker that does not
take a message within the meeting's timeout: choose it as short as a draft may be late. After either the link
is of no use, and a new generation of it must be made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gammaray.engine.ranks import FOREVER_S, Group, Seat

TARGET, WORKER = 0, 1  # ranks


@dataclass(frozen=True, slots=True)
class Shape:
    """The largest message."""

    tokens: int  # rows of features
    width: int  # F: hidden size x layers
    sequences: int
    dtype: torch.dtype
    device: str = "cpu"


class FeatureLink:
    """One end. `seat`: at a meeting of two that the target has opened (`gammaray.engine.ranks`)."""

    def __init__(self, seat: Seat, shape: Shape) -> None:
        self._group = _group(seat)
        self._header = torch.zeros(1 + shape.sequences, dtype=torch.int64, device=shape.device)
        self._rows = torch.empty(shape.tokens, shape.width, dtype=shape.dtype, device=shape.device)

    def send(self, features: Tensor, counts: Sequence[int]) -> None:
        """features [N, F], of the link's dtype; counts: how many of the N rows belong to each sequence.

        Raises ValueError for what does not fit.
        """
        rows, capacity = len(features), len(self._header) - 1
        if features.shape[1:] != self._rows.shape[1:] or features.dtype != self._rows.dtype:
            raise ValueError(
                f"features are {list(features.shape)} {features.dtype}, the link carries "
                f"[N, {self._rows.shape[1]}] {self._rows.dtype}"
            )
        if sum(counts) != rows or rows > len(self._rows) or len(counts) > capacity:
            raise ValueError(
                f"{rows} rows for {len(counts)} sequences that have {sum(counts)}; the link carries "
                f"{len(self._rows)} rows for {capacity}"
            )
        self._header.copy_(torch.tensor([len(counts), *counts, *[0] * (capacity - len(counts))]))
        self._rows[:rows].copy_(features)
        self._group.send(self._header, WORKER)
        if rows:
            self._group.send(self._rows[:rows], WORKER)

    def receive(self) -> tuple[Tensor, list[int]]:
        """What `send` was given. The features are a view that the next call overwrites."""
        sequences, *counts = self._group.receive(self._header, TARGET).tolist()
        counts = counts[:sequences]
        rows = self._rows[: sum(counts)]
        return (self._group.receive(rows, TARGET) if len(rows) else rows), counts

    def close(self) -> None:
        self._group.close()


def _group(seat: Seat) -> Group:
    group = seat.group("features", seat.meeting.backend)
    group.set_patience(FOREVER_S if seat.rank == WORKER else seat.meeting.timeout_s)
    return group
