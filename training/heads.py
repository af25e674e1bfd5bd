"""What all heads take from their target, and how a trained one is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor

from gammaray import papers
from gammaray.engine.batch import Row
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError
from gammaray.training.files import replacing

NEAR = 0.01  # of the largest logit: rounding in the target's dtype is less, a cap or a scale is more


def check_projects(target: ModelRunner) -> None:
    """Whether the target's logits are a projection of its last states, as heads are taught them.

    Raises ConfigError for a target that does more, such as capping or scaling them.
    """
    row = Row([token % target.vocab_size for token in (1, 2, 3)], 0, [0], logits=1)
    logits, states = target.forward_features([row], (target.num_layers + 1,))  # [1, V], [3, H]
    told = TargetHead.of(target).logits(states[-1:])
    if float((told - logits.float()).abs().max()) > NEAR * float(logits.abs().max()):
        raise ConfigError(
            "the target caps or scales its logits, which no head is taught yet: draft without one"
        )


@dataclass(frozen=True, slots=True)
class TargetHead:
    """The matrix that makes the target's logits, in float32, and whose gradients can be had."""

    rows: Tensor  # [V, H]
    bias: Tensor | None  # [V]

    @staticmethod
    def of(runner: ModelRunner) -> TargetHead:
        tokens = torch.arange(runner.vocab_size, device=runner.device)
        rows, bias = runner.telling.head_rows(tokens)
        return TargetHead(rows.float(), None if bias is None else bias.float())

    def only(self, tokens: Tensor) -> TargetHead:
        """Of `tokens` [Vd]."""
        return TargetHead(self.rows[tokens], None if self.bias is None else self.bias[tokens])

    def logits(self, states: Tensor) -> Tensor:
        """What the target says behind states [..., H] that its final norm has seen: [..., V] float32."""
        with torch.autocast(states.device.type, enabled=False):  # also where the trainee computes in bfloat16
            return F.linear(states.float(), self.rows, self.bias)


def shares(tally: Tensor) -> dict[str, float]:
    """From sums of each place, [3, D] flattened: `overlap_j`, the mean of 1 - TV, which a draft that is drawn
    is accepted with; `agreed_j`, how often the likeliest token is the target's, which any other one is
    accepted with at temperature 0. Both with the target's own text before the place."""
    overlap, agreed, counted = tally.view(3, -1)
    columns = {"overlap": overlap / counted.clamp(min=1), "agreed": agreed / counted.clamp(min=1)}
    return {
        f"{name}_{place}": share
        for name, column in columns.items()
        for place, share in enumerate(column.tolist(), 1)
    }


def narrow(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is float32, in bfloat16."""
    return {name: x.bfloat16() if x.dtype == torch.float32 else x for name, x in tensors.items()}


def write(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], target: str = "") -> None:
    """A checkpoint as the engine's loader reads it; `target`: the hash of the weights that it is tied to."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / papers.WEIGHTS) as work:
        # Copies, as safetensors takes no two names for one memory; not its `save_file`, as what that writes
        # is for the owner's eyes only.
        work.write_bytes(
            save({name: x.detach().to("cpu", copy=True).contiguous() for name, x in tensors.items()})
        )
    with replacing(folder / papers.CONFIG) as work:
        tied = dict(settings) | ({papers.TARGET: target} if target else {})
        work.write_text(json.dumps(tied, indent=2) + "\n", encoding="utf-8")
