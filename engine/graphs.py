"""Forward passes captured for fixed sizes: a step is padded to the next bucket and replayed without torch.

A CUDA graph is a recorded sequence of launches on fixed addresses. So there is one tensor for all of a step's
integers (`Step.flat`), which is filled before a replay, and one that replays leave their logits in, besides
one for hidden states if somebody wants them; buckets share them, as one replay follows the other. How a pass
is recorded is `Capture`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from gammaray.engine.batch import Step, StepSizes, pinned
from gammaray.types import MAX_TREE_NODES

MOST_TOKENS = 512  # a longer step takes the device longer than telling it what to do
TOKENS_PER_ROW = (1, 2, 4, 8, 16, 64)  # decoding, and ever larger trees


class Capture(Protocol):
    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do `work`, and return what does it again on the same tensors, whatever they hold then."""


class CudaCapture:
    """CUDA graphs that share their memory, as no two of them run at once. Never ran: there was no GPU."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            work()  # compiles kernels, and allocates what libraries keep: neither may happen in a capture
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph.replay


class Graphs:
    """One model's passes, recorded at once, the largest first: it takes the memory that the others share."""

    def __init__(
        self,
        forward: Callable[[Step], Sequence[Tensor]],
        sizes: Sequence[StepSizes],
        sample: Step,
        device: torch.device,
        nowhere: int,
        capture: Capture,
    ) -> None:
        """`forward`: logits [N, V] of a step on the device, and perhaps hidden states [T, F] of all its
        tokens. `sample`: what runs while passes are recorded, in this machine's memory. `nowhere`: see
        `Step.padded`."""
        self._nowhere = nowhere
        self._forward = forward
        self._flat = torch.zeros(max(sum(each.parts) for each in sizes), dtype=torch.int64, device=device)
        self._outputs: list[Tensor] = []  # large enough for every bucket
        self._ascending = sorted(sizes)
        self._replays: dict[StepSizes, Callable[[], None]] = {}
        for bucket in sorted(sizes, key=lambda each: (each.wanted, each), reverse=True):
            self._replays[bucket] = self._record(bucket, sample, capture)

    @property
    def tokens(self) -> list[int]:
        """What steps are padded to, ascending."""
        return sorted({bucket.tokens for bucket in self._ascending})

    def bucket(self, sizes: StepSizes) -> StepSizes | None:
        """The smallest one that holds such a step."""
        return next((bucket for bucket in self._ascending if sizes.fits(bucket)), None)

    def run(self, step: Step, bucket: StepSizes) -> list[Tensor]:
        """What `forward` gives, of a step that lies in this machine's memory. It holds until the next run."""
        self._fill(step, bucket)
        self._replays[bucket]()
        return self._cut(step.sizes)

    def _fill(self, step: Step, bucket: StepSizes) -> Step:
        """The bucket's own step. Of its block table, which may be wide, only what is read is written."""
        rows, width = step.sizes.rows, step.sizes.blocks
        own = Step.of(self._flat[: sum(bucket.parts)], bucket)
        padded = step.padded(replace(bucket, blocks=width), self._nowhere)
        source = Step.of(pinned(padded.flat, self._flat.device), padded.sizes)
        before = sum(bucket.parts[:-1])  # the table comes last
        own.flat[:before].copy_(source.flat[:before], non_blocking=True)
        own.paged.block_table[:rows, :width].copy_(source.paged.block_table[:rows], non_blocking=True)
        return own

    def _record(self, bucket: StepSizes, sample: Step, capture: Capture) -> Callable[[], None]:
        step = self._fill(sample, bucket)
        if not self._outputs:
            most = max(each.wanted for each in self._ascending), max(each.tokens for each in self._ascending)
            made = zip(self._forward(step), most, strict=False)
            self._outputs = [part.new_empty(count, part.shape[1]) for part, count in made]
        outputs = self._cut(bucket)

        def work() -> None:
            for output, part in zip(outputs, self._forward(step), strict=True):
                output.copy_(part)

        return capture.record(work)

    def _cut(self, sizes: StepSizes) -> list[Tensor]:
        """The part of the outputs that a step of such sizes has."""
        return [
            part[:count] for part, count in zip(self._outputs, (sizes.wanted, sizes.tokens), strict=False)
        ]


def buckets(max_batch: int, token_budget: int, blocks: int, nodes: int = MAX_TREE_NODES) -> list[StepSizes]:
    """For steps that decode and verify: up to max_batch rows of a token and a tree each, within the budget.

    Each count of tokens comes with several counts of rows, as attention goes by the tokens of a row. Every
    token's logits may be wanted. Steps beyond these, chunks of prompts most of them, run as they are.
    """
    most = min(token_budget, max_batch * (1 + nodes), MOST_TOKENS)
    return sorted(
        {
            StepSizes(tokens, min(-(-tokens // each), max_batch), tokens, blocks)
            for tokens in _counts(most)
            for each in TOKENS_PER_ROW
        }
    )


def _counts(most: int) -> Iterator[int]:
    """1, 2, 4, 8, 16, 24, 32, 48, ... and `most`: at most a half is padding, from 16 on a third."""
    count = 1
    while count < most:
        yield count
        if 16 <= count < count * 3 // 2 < most:
            yield count * 3 // 2
        count *= 2
    yield most
