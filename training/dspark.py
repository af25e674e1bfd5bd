"""Trains a DSpark drafter: block backbone, Markov head and confidence head together (arXiv 2607.05147).

Blocks begin at places of a text that are drawn anew in every step, about as many as cover it once. What a
confidence is worth is found out afterwards (`calibrate.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gammaray.engine.drafters.block_config import BlockConfig, parse
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError
from gammaray.training.batches import Batch
from gammaray.training.block import BlockModule
from gammaray.training.block_loss import BlockLoss, block_loss
from gammaray.training.heads import TargetHead, narrow, shares, write

MARKOV = ("vanilla", "gated", "rnn")
TABLES = ("lm_head.weight", "markov_w1.weight", "markov_w2.weight")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a drafter. What is 0 is as in the target."""

    block: int = 5  # tokens that are drafted at once
    depth: int = 2  # decoder layers
    inner: int = 0  # of their MLPs
    rank: int = 64  # of the Markov head; 0: none
    markov: str = "vanilla"

    def __post_init__(self) -> None:
        if self.markov not in MARKOV:
            raise ConfigError(f"a Markov head {self.markov!r} is not known: use {', '.join(MARKOV)}")


def settings(
    target: Any, layers: Sequence[int], sizes: Sizes, draft_vocab: int, mask_token: int
) -> dict[str, Any]:
    """config.json, in the speculators layout. `target`: its text model's configuration, in transformers'
    form; `layers`: of the target, as `ModelRunner.forward_features` counts them."""
    rope = getattr(target, "rope_parameters", None) or {}
    heads = target.num_attention_heads
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "aux_hidden_state_layer_ids": list(layers),
        "block_size": sizes.block,
        "sample_from_anchor": True,
        "mask_token_id": mask_token,
        "draft_vocab_size": draft_vocab,
        "markov_rank": sizes.rank,
        "markov_head_type": sizes.markov,
        "enable_confidence_head": True,
        "confidence_head_with_markov": sizes.rank > 0,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": target.hidden_size,
            "intermediate_size": sizes.inner or target.intermediate_size,
            "num_hidden_layers": sizes.depth,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
            "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
            "vocab_size": target.vocab_size,
            "max_position_embeddings": target.max_position_embeddings,
            "rms_norm_eps": float(getattr(target, "rms_norm_eps", 1e-6)),
            "rope_parameters": {"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
        },
    }


class DsparkTrainee:
    """Implements `gammaray.training.loop.Trainee`."""

    def __init__(self, runner: ModelRunner, config: dict[str, Any], tokens: Tensor, target: str = "") -> None:
        """`config`: see `settings`; `tokens` [Vd]: the draft vocabulary; `target`: the hash of its weights.

        Raises ConfigError.
        """
        self._tied = target
        self._settings = config
        self._config: BlockConfig = parse(config, "the new drafter")
        self._target = TargetHead.of(runner)
        self._last = runner.num_layers + 1  # what the target's head reads
        self._tokens = tokens.to(runner.device)
        every = torch.arange(runner.vocab_size, device=runner.device)
        embedding = runner.telling.embed(every).detach().float()
        self._column = torch.full_like(every, -1).index_copy_(0, self._tokens, every[: len(tokens)])  # [V]
        own_head = len(tokens) < runner.vocab_size
        drafter = BlockModule(self._config, embedding, self._target.only(self._tokens), own_head)
        self._drafter = drafter.to(runner.device)
        self.module = Drawing(self._drafter)

    @property
    def tables(self) -> list[nn.Parameter]:
        return [x for name, x in self.module.named_parameters() if name.endswith(TABLES)]

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        draw = self.module.generator()
        found = [self._of(batch, index, draw) for index in range(len(batch.tokens))]
        weight = torch.stack([each.weight for each in found]).sum()
        return torch.stack([self._taught(each) for each in found]).sum(), weight

    def tally(self, batch: Batch) -> Tensor:
        """Sums over blocks that cover each text evenly; [3, D] flattened."""
        found = [self._of(batch, index, None) for index in range(len(batch.tokens))]
        columns = [torch.stack([each.overlap, each.agreed, each.counted]).double() for each in found]
        return torch.stack(columns).sum(0).flatten()

    def figures(self, tally: Tensor) -> dict[str, float]:
        """See `gammaray.training.heads.shares`."""
        return shares(tally)

    def export(self, folder: Path) -> None:
        tensors = self._drafter.state_dict()
        if "lm_head.weight" in tensors:
            tensors["d2t"] = self._tokens - torch.arange(len(self._tokens), device=self._tokens.device)
        write(folder, self._settings, narrow(tensors), self._tied)

    def _taught(self, found: BlockLoss) -> Tensor:
        return found.whole

    def _of(self, batch: Batch, index: int, draw: torch.Generator | None) -> BlockLoss:
        """One text, with blocks at drawn places, else evenly spaced ones."""
        tokens, answers = batch.tokens[index], batch.answers[index]
        anchors = _anchors(answers, self._config.drafted, draw)
        features = batch.states(self._config.layers)[index].float()
        told = self._drafter(tokens, features, anchors)
        places = anchors[:, None] + torch.arange(self._config.drafted, device=anchors.device)  # [N, D]
        inside = places < len(tokens) - 1
        places = torch.where(inside, places, 0)
        with torch.no_grad():
            p = self._target.logits(batch.states([self._last])[index][places]).softmax(-1)  # [N, D, V]
            best = self._column[p.argmax(-1)]
        counts = inside & answers[places + 1]
        return block_loss(told, p[..., self._tokens], best, counts)


class Drawing(nn.Module):
    """A drafter, and how often it has drawn: a checkpoint keeps that, so what is drawn next is known."""

    drawn: Tensor

    def __init__(self, drafter: BlockModule) -> None:
        super().__init__()
        self.drafter = drafter
        self.register_buffer("drawn", torch.zeros((), dtype=torch.int64))

    def generator(self) -> torch.Generator:
        """On the CPU, so that every device draws the same."""
        self.drawn += 1
        return torch.Generator().manual_seed(int(self.drawn))


def _anchors(answers: Tensor, drafted: int, draw: torch.Generator | None) -> Tensor:
    """Where blocks begin, [N]: places behind which stands a token that the target wrote, but the first, as
    there is no state before it; one of `drafted` of them. Where there are none, the second, of no weight."""
    able = answers[2:].nonzero()[:, 0] + 1
    if not len(able):
        return torch.ones(1, dtype=torch.int64, device=answers.device)
    if draw is None:
        return able[::drafted]
    chosen = torch.randperm(len(able), generator=draw)[: -(-len(able) // drafted)]
    return able[chosen.to(able.device)]
