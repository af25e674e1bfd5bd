"""A target whose weights several processes share: tensor parallelism. Rank 0 is a ModelRunner, others follow.

    seat = ranks.host(size, address)                  # in rank 0; seat.meeting goes to the others
    build.follow(config, rank, seat.meeting)          # in each other process: its whole life
    build.build_engine(config, ranks=seat)            # in rank 0, meanwhile

Every rank runs the same forward pass over its own attention heads and its own KV pool, in lock step: rank 0
broadcasts what a step packs, and the ranks meet at the end of each attention and each MLP (`sharding.py`).
Only rank 0 wants logits. A rank that fails in the midst of a step cannot be waited for, so every failure
there is final: rank 0 raises ReplicaLost, and the others end.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gammaray.engine.attention import Model
from gammaray.engine.batch import Step, StepSizes
from gammaray.engine.discreet import described
from gammaray.engine.peers import KV, NOTHING, Link, Order
from gammaray.engine.pool import KVPool
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError, ReplicaLost
from gammaray.kernels.paths import AttentionSizes

log = logging.getLogger(__name__)
WHOLE_PASSES = (
    "the ranks of a target that is cut run whole passes only, so layer_exit needs tensor_parallel: 1; "
    "or use method: model"
)


class ParallelRunner(ModelRunner):
    """Rank 0. Every failure between an order and its end is a ReplicaLost, and so is every call after it."""

    def __init__(
        self,
        link: Link,
        model: Model,
        pool: KVPool,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...] = (),
        sizes: AttentionSizes | None = None,
    ) -> None:
        super().__init__(
            model,
            pool,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            sizes=sizes,
        )
        link.started()
        self._link = link
        self.close = weakref.finalize(self, link.stop)  # at the latest when this process ends by itself

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        with self._lock_step():
            self._link.order(Order.FORWARD, astuple(step.sizes), step.flat)
            return super().run(step)

    def first(self, layers: int, end: PreTrainedModel | None = None) -> ModelRunner:
        raise ConfigError(WHOLE_PASSES)

    @torch.inference_mode()
    def run_features(self, step: Step, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        with self._lock_step():
            self._link.order(Order.FORWARD, astuple(step.sizes), step.flat)
            return super().run_features(step, layers)

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        if src:
            with self._lock_step():
                self._link.order(Order.MOVE, [len(src)], torch.tensor([*src, *dst]))
                super().move(src, dst)

    @torch.inference_mode()
    def dense(self, tokens: Sequence[int]) -> tuple[Tensor, KV]:
        with self._lock_step():
            self._link.order(Order.DENSE, [len(tokens)], torch.tensor(tokens))
            logits, kv = super().dense(tokens)
            return logits, self._link.whole(kv)

    @torch.inference_mode()
    def read_kv(self, slots: Sequence[int]) -> KV:
        with self._lock_step():
            self._link.order(Order.READ, [len(slots)], torch.tensor(slots, dtype=torch.int64))
            return self._link.whole(super().read_kv(slots))

    @contextlib.contextmanager
    def _lock_step(self) -> Iterator[None]:
        if not self.close.alive:
            raise ReplicaLost("the ranks of the target have parted; its replica will be replaced")
        try:
            yield
        except Exception as error:
            self.close.detach()
            self._link.close()
            if isinstance(error, ConnectionError):  # its text holds addresses: for the log only
                log.error("%s", error)
                raise ReplicaLost("a rank of the target is gone or stuck") from error
            log.error("the target failed in the midst of a step (%s)\n%s", *described(error))
            raise ReplicaLost(f"the ranks of the target are out of step: {type(error).__name__}") from error


def obey(runner: ModelRunner, link: Link) -> None:
    """Any rank but 0: do what rank 0 orders until it says stop. Raises ReplicaLost when it is gone."""
    link.started()
    try:
        while True:
            order, sizes = link.await_order()
            if order is Order.STOP:
                return
            _carry_out(runner, link, order, sizes)
    except ConnectionError as error:
        raise ReplicaLost(f"rank 0 of the target is gone: {error}") from error


@torch.inference_mode()
def _carry_out(runner: ModelRunner, link: Link, order: Order, sizes: Sequence[int]) -> None:
    count = sizes[0]
    if order is Order.FORWARD:
        runner.run(_step(link, sizes))
    elif order is Order.MOVE:
        slots = link.payload(2 * count).tolist()
        runner.move(slots[:count], slots[count:])
    elif order is Order.DENSE:
        link.whole(runner.dense(link.payload(count).tolist())[1])
    elif order is Order.READ:
        link.whole(runner.read_kv(link.payload(count).tolist()))


def _step(link: Link, sizes: Sequence[int]) -> Step:
    """Without the wanted rows: those are rank 0's affair."""
    known = StepSizes(*sizes)
    return replace(Step.of(link.payload(sum(known.parts)), known), wanted=NOTHING)
