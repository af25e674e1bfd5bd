"""How parameters learn: matrices between hidden states by Muon, all others by AdamW.

Muon (Jordan et al., 2024) makes the update of a matrix orthogonal. With the size of updates matched to that
of AdamW (arXiv 2502.16982, eq. 4) a small head learns in far fewer steps; docs/decisions/0016 has the
figures. It is not for vectors, nor for tables with a row for each token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

GENTLY = 0.25  # the learning rate of tables over that of the rest: many of them begin as the target's
BETAS = (0.9, 0.95)  # of AdamW (1711.05101); the second is that of EAGLE's authors


class Optimizers:
    """Both as one, of the parameters of `module` that learn.

    `tables`: those with a row for each token; `decay`: of these and of matrices, while vectors (norms,
    biases, a single row) do not decay.
    """

    def __init__(self, module: nn.Module, tables: Sequence[nn.Parameter], decay: float) -> None:
        learning = [x for x in module.parameters() if x.requires_grad]
        vectors = [x for x in learning if x.dim() < 2 or 1 in x.shape]
        beside = {*map(id, vectors), *map(id, tables)}
        matrices = [x for x in learning if id(x) not in beside]
        tables = [x for x in tables if x.requires_grad]
        self._muon = [Muon(matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw")] if matrices else []
        groups = _groups((tables, decay, GENTLY), (vectors, 0.0, 1.0))
        self._adam = [AdamW(groups, betas=BETAS, fused=True)] if groups else []

    def step(self, rate: float) -> None:
        """With the gradients that are there. `rate`: the learning rate."""
        for optimizer in self._all():
            for group in optimizer.param_groups:
                group["lr"] = group.get("share", 1.0) * rate
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._all():
            optimizer.zero_grad()

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._all()]

    def load_state_dict(self, states: Iterable[dict[str, Any]]) -> None:
        for optimizer, state in zip(self._all(), states, strict=True):
            optimizer.load_state_dict(state)

    def _all(self) -> list[Optimizer]:
        return [*self._muon, *self._adam]


def _groups(*sorts: tuple[Sequence[nn.Parameter], float, float]) -> list[dict[str, Any]]:
    return [
        {"params": params, "weight_decay": decay, "share": share} for params, decay, share in sorts if params
    ]
