"""Whether what was verified is what the dense model says: samples for the quality layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp
from typing import Protocol

import torch
from torch import Tensor

from gammaray.engine.sequence import Sequence
from gammaray.types import PolicySnapshot, Quality

MOST_ROWS = 64  # of [V] float32 that are kept of a sequence
MOST_CONTEXT = 1024  # tokens that the dense model is fed, in one pass that everybody waits for


class Dense(Protocol):
    """The part of a ModelRunner that is asked."""

    def dense(self, tokens: list[int]) -> tuple[Tensor, object]: ...


@dataclass(slots=True)
class Audit:
    """The logits that the first tokens of a sequence were verified with."""

    rid: str
    rows: list[Tensor] = field(default_factory=list)  # [V] each

    def add(self, rows: Tensor) -> None:
        """rows [N, V], of its next N tokens."""
        self.rows += rows[: MOST_ROWS - len(self.rows)].clone()


def due(sequence: Sequence, policy: PolicySnapshot) -> bool:
    """A sequence that has just begun, short enough, of a key that is to be audited."""
    fresh = sequence.generated == 0 and len(sequence.tokens) + MOST_ROWS <= MOST_CONTEXT
    return fresh and sequence.key in policy.audit


@torch.inference_mode()
def judge(audit: Audit, sequence: Sequence, runner: Dense) -> Quality | None:
    """KL(p_dense || p_verify) in nats, teacher-forced; None when nothing was generated."""
    count, prompt = len(audit.rows), len(sequence.request.prompt)
    if not count:
        return None
    tokens = sequence.tokens[: prompt + count]
    dense = runner.dense(tokens)[0][prompt - 1 : prompt - 1 + count].double().log_softmax(-1)  # [count, V]
    verified = torch.stack(audit.rows).double().log_softmax(-1)
    p = dense.exp()
    kl = float(
        torch.where(p == 0, 0.0, p * (dense - verified)).sum(-1).mean()
    )  # NaN stays: nobody may trust it
    emitted = dense.gather(1, torch.tensor(tokens[prompt:], device=dense.device)[:, None])
    return Quality(count, kl if not kl < 0 else 0.0, exp(-float(emitted.mean())))
