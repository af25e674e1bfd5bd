"""Medusa heads (arXiv 2401.10774, section 2.2.1): the target stays as it is, each head learns one place.

Head k (0, 1, ...) reads the state that gave token t + 1, and learns the target's distribution of token
t + 2 + k, which the state behind token t + 1 + k tells. At first a head says what the target's own head says
of its state: its blocks add nothing, and its projection is the target's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gammaray.engine.runner import ModelRunner
from gammaray.training.batches import Batch
from gammaray.training.heads import TargetHead, narrow, shares, write

DECAY = 0.8  # weight of a head, over that of the one before it (section 2.2.1)


class MedusaModule(nn.ModuleList):
    """Its state dict has the keys of public checkpoints (`engine/drafters/medusa.py`)."""

    def __init__(self, rows: Tensor, heads: int, layers: int, own_vocabulary: bool) -> None:
        """`rows` [V, H]: of the target's head. `own_vocabulary`: heads learn projections of their own."""
        super().__init__(_head(rows, layers, own_vocabulary) for _ in range(heads))


class _Block(nn.Module):
    """x + SiLU(W x + b), at first x."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


def _head(rows: Tensor, layers: int, own_vocabulary: bool) -> nn.Sequential:
    count, size = rows.shape
    projection = nn.Linear(size, count, bias=False)
    projection.weight = nn.Parameter(rows.clone() if own_vocabulary else rows, own_vocabulary)
    return nn.Sequential(*(_Block(size) for _ in range(layers)), projection)


class MedusaTrainee:
    """Implements `gammaray.training.loop.Trainee`."""

    def __init__(
        self,
        runner: ModelRunner,
        target: str = "",
        heads: int = 4,
        layers: int = 1,
        own_vocabulary: bool = False,
    ) -> None:
        """`target`: the hash of its weights."""
        self._tied = target
        self._target = TargetHead.of(runner)
        self._layer = runner.num_layers + 1  # what the target's head reads
        self._blocks = layers
        self.module = MedusaModule(self._target.rows, heads, layers, own_vocabulary).to(runner.device)

    @property
    def tables(self) -> list[nn.Parameter]:
        return [x for name, x in self.module.named_parameters() if ".linear." not in name]  # projections

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Soft cross-entropy of all heads, each head by its weight."""
        losses = [
            DECAY**k * checkpoint(self._soft, head, reads, ahead, use_reentrant=False)
            for k, (head, reads, ahead) in enumerate(self._places(batch))
        ]  # with logits [N, V] of one head at a time in memory
        return torch.stack(losses).sum(), batch.answers[:, 2:].sum()

    def tally(self, batch: Batch) -> Tensor:
        """Of each head, [3, K] flattened: 1 - TV, places whose likeliest token is the target's, places."""
        found = []
        for head, reads, ahead in self._places(batch):
            q, p = head(reads).softmax(-1), self._target.logits(ahead).softmax(-1)  # [N, V] each
            agreed = (q.argmax(-1) == p.argmax(-1)).sum()
            found.append(torch.stack([torch.minimum(p, q).sum(), agreed, agreed.new_tensor(len(p))]))
        return torch.stack(found, 1).double().flatten()

    def figures(self, tally: Tensor) -> dict[str, float]:
        """See `gammaray.training.heads.shares`."""
        return shares(tally)

    def export(self, folder: Path) -> None:
        settings = {"medusa_num_heads": len(self.module), "medusa_num_layers": self._blocks}
        write(folder, settings, narrow(self.module.state_dict()), self._tied)

    def _places(self, batch: Batch) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
        """Each head, the states [N, H] that it reads, and those that tell what it is to say. Behind the
        latter stands a token that the target wrote."""
        states = batch.states([self._layer])  # [B, T, H]
        length = states.shape[1]
        for k, head in enumerate(self.module):
            counts = batch.answers[:, 2 + k :]
            reads, ahead = states[:, : max(length - 2 - k, 0)], states[:, 1 + k : max(length - 1, 1 + k)]
            yield head, reads[counts].float(), ahead[counts]

    def _soft(self, head: nn.Module, reads: Tensor, ahead: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self._target.logits(ahead).softmax(-1)
        return F.cross_entropy(head(reads), wanted, reduction="sum")
