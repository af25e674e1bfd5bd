"""The confidence head of a block drafter that is there already, trained alone.

For a drafter from elsewhere, or one whose target was tuned since: labels are 1 - TV of the drafter as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gammaray.engine.drafters.block_config import parse
from gammaray.engine.drafters.head_loading import fill, read_config, read_tensors
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError
from gammaray.training.block import BlockModule
from gammaray.training.block_loss import BlockLoss
from gammaray.training.dspark import DsparkTrainee
from gammaray.training.heads import write

HEAD = "confidence_head."
EMBEDDING, VOCABULARY = "embed_tokens.weight", "lm_head.weight"
BESIDE = ("t2d", "d2t", "verifier_lm_head.weight", "verifier_norm.weight", EMBEDDING)  # not of the module


class ConfidenceTrainee(DsparkTrainee):
    """Learns nothing but the confidence head, and saves the rest as it was."""

    def __init__(self, runner: ModelRunner, folder: Path, target: str = "") -> None:
        """`folder`: of the drafter. Raises ConfigError."""
        self._tensors, found = read_tensors(folder), read_config(folder)
        config = parse(found, str(folder))
        if not config.confident:
            raise ConfigError(f"{folder}: config.json needs enable_confidence_head: true")
        tokens = torch.arange(config.draft_vocab)
        super().__init__(runner, untempered(found), tokens + self._tensors.get("d2t", 0), target)
        embedding = self._tensors.get(EMBEDDING, self._drafter.embedding).to(self._drafter.embedding)
        own_head = VOCABULARY in self._tensors
        self._drafter = BlockModule(config, embedding, self._drafter.head, own_head).to(runner.device)
        self.module.drafter = self._drafter
        begun = {key: x for key, x in self._drafter.state_dict().items() if key.startswith(HEAD)}
        given = {key: x for key, x in self._tensors.items() if key not in BESIDE}
        fill(self._drafter, begun | given, str(folder), like=embedding)
        for name, x in self._drafter.named_parameters():
            x.requires_grad_(name.startswith(HEAD))

    def export(self, folder: Path) -> None:
        trained = {key: x for key, x in self._drafter.state_dict().items() if key.startswith(HEAD)}
        write(folder, self._settings, self._tensors | trained, self._tied)

    def _taught(self, found: BlockLoss) -> Tensor:
        return found.confidence


def untempered(settings: dict[str, Any]) -> dict[str, Any]:
    """Without the temperatures of a head that will be another."""
    return {key: value for key, value in settings.items() if key != "confidence_temperatures"}
