"""What one rank of a tensor-parallel target holds of the others, at the start and in steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gammaray.engine import sharding
from gammaray.engine.ranks import FOREVER_S, Group, Seat
from gammaray.errors import ConfigError

STOP_S = 2.0  # for the others to hear that they may go
TEXT_BYTES = 512  # of what ranks tell each other in words
SIZES = 4  # numbers that come with every order
NOTHING = torch.empty(0, dtype=torch.int64)

T = TypeVar("T")
KV = list[tuple[Tensor, Tensor]]


class Order(IntEnum):
    STOP = 0
    FORWARD = 1  # the step's T, R, N and NB
    MOVE = 2  # N slots
    DENSE = 3  # T tokens
    READ = 4  # N slots


class Alone:
    """The one rank of a target that is not cut."""

    rank, size = 0, 1

    def together(self, work: Callable[[], T]) -> T:
        return work()

    def cut(self, model: PreTrainedModel) -> PreTrainedModel:
        return model

    def agree(self, text: str) -> None:
        pass

    def least(self, number: int) -> int:
        return number


ALONE = Alone()


class Link:
    """One rank's connections to the others. What fails on them is a ConnectionError."""

    def __init__(self, seat: Seat) -> None:
        self.rank, self.size = seat.rank, seat.meeting.size
        self._timeout_s = seat.meeting.timeout_s
        self._orders: Group = seat.group("orders")
        self._sums: Group = seat.group("sums", seat.meeting.backend)  # of tensors where the weights are
        self._sums.set_patience(self._timeout_s)

    # At the start ------------------------------------------------------------------------------------

    def together(self, work: Callable[[], T]) -> T:
        """The result of `work`, which all ranks do at once. Raises on every rank when it fails on one."""
        try:
            result = work()
        except Exception as error:
            self._tell(str(error) or type(error).__name__)
            raise
        for rank, text in enumerate(self._tell("")):
            if text:
                raise ConfigError(f"rank {rank} of the target failed: {text}")
        return result

    def cut(self, model: PreTrainedModel) -> PreTrainedModel:
        """This rank's part of a model."""
        return sharding.cut(model, self.rank, self.size, self._sums.all_reduce)

    def agree(self, text: str) -> None:
        """Raises ConfigError unless all ranks say the same."""
        told = self._tell(text)
        if len(set(told)) > 1:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told))
            raise ConfigError(f"the ranks of the target did not load the same: {listed}")

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return min(int(part) for part in self._orders.all_gather(torch.tensor([number])))

    def _tell(self, text: str) -> list[str]:
        """Every rank's text."""
        data = text.encode()[:TEXT_BYTES]
        padded = torch.tensor([*data, *[0] * (TEXT_BYTES - len(data))], dtype=torch.uint8)
        parts = (bytes(part.tolist()) for part in self._orders.all_gather(padded))
        return [part.rstrip(b"\0").decode(errors="replace") for part in parts]

    def close(self) -> None:
        """The other ranks, where they wait for this one, get a ConnectionError."""
        self._orders.close()
        self._sums.close()

    def stop(self) -> None:
        """Rank 0: the others may go. Those that do not listen any more notice that the connections close."""
        with contextlib.suppress(ConnectionError):
            self._orders.set_patience(STOP_S)
            self.order(Order.STOP)
        self.close()

    # In steps ----------------------------------------------------------------------------------------

    def started(self) -> None:
        """From now on an order may take any time to come, but not to be taken."""
        self._orders.set_patience(FOREVER_S if self.rank else self._timeout_s)

    def order(self, order: Order, sizes: Sequence[int] = (), payload: Tensor = NOTHING) -> None:
        """Rank 0: what all ranks do next, and on what; payload int64."""
        self._orders.broadcast(torch.tensor([order, *sizes, *[0] * (SIZES - len(sizes))]))
        if len(payload):
            self._orders.broadcast(payload)

    def await_order(self) -> tuple[Order, list[int]]:
        """The others: the next order and its sizes."""
        order, *sizes = self._orders.broadcast(torch.zeros(1 + SIZES, dtype=torch.int64)).tolist()
        return Order(order), sizes

    def payload(self, size: int) -> Tensor:
        """[size] int64: what comes with an order."""
        payload = torch.empty(size, dtype=torch.int64)
        return self._orders.broadcast(payload) if size else payload

    def whole(self, kv: KV) -> KV:
        """Keys and values [T, H, D] per layer, of all ranks' heads."""
        own = [x for pair in kv for x in pair]
        packed = torch.cat([x.flatten() for x in own])  # one message
        ranks = [part.split([x.numel() for x in own]) for part in self._sums.all_gather(packed)]
        parts = zip(own, *ranks, strict=True)
        whole = [torch.cat([part.view(x.shape) for part in found], 1) for x, *found in parts]
        return list(zip(whole[::2], whole[1::2], strict=True))
