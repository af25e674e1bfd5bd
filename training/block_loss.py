"""What a block drafter is taught (DSpark, arXiv 2607.05147, section 3.3).

    loss = 0.1 CE + 0.9 |p - q| + BCE(confidence, 1 - TV(p, q)),   places weighted by exp(-k / 4)

CE is taken against the target's whole distribution p instead of the one token that was drawn from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gammaray.training.block import Told

CE_WEIGHT, L1_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
DECAY = 4.0  # places, after which one counts for 1 / e


@dataclass(frozen=True, slots=True)
class BlockLoss:
    """Sums over the places that count."""

    draft: Tensor  # scalar: CE and L1, weighted
    confidence: Tensor  # scalar; 0 without such a head
    weight: Tensor  # scalar, of both
    overlap: Tensor  # [D], 1 - TV, unweighted as what follows
    agreed: Tensor  # [D], places whose likeliest token is the target's
    counted: Tensor  # [D]

    @property
    def whole(self) -> Tensor:
        return self.draft + CONFIDENCE_WEIGHT * self.confidence


def block_loss(told: Told, wanted: Tensor, best: Tensor, counts: Tensor) -> BlockLoss:
    """`wanted` [N, D, Vd]: p of the draft vocabulary's tokens, which sums to less than 1 where the target
    wants others; `best` [N, D]: the likeliest token as an index of the draft vocabulary, -1 where it is not
    in there; `counts` [N, D] bool."""
    log_q = told.logits.float().log_softmax(-1)
    ce = -(wanted * log_q).sum(-1)  # [N, D]
    l1 = (wanted - log_q.exp()).abs().sum(-1) + 1 - wanted.sum(-1)
    overlap = (1 - l1 / 2).detach().clamp(0, 1)
    sure = torch.zeros_like(ce)
    if told.confidence is not None:
        sure = F.binary_cross_entropy_with_logits(told.confidence.float(), overlap, reduction="none")
    weights = counts * (-torch.arange(counts.shape[1], device=counts.device) / DECAY).exp()  # [N, D]
    return BlockLoss(
        draft=((CE_WEIGHT * ce + L1_WEIGHT * l1) * weights).sum(),
        confidence=(sure * weights).sum(),
        weight=weights.sum(),
        overlap=(overlap * counts).sum(0),
        agreed=((told.logits.argmax(-1) == best) & counts).sum(0),
        counted=counts.sum(0),
    )
