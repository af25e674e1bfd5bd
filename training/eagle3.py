"""Training an EAGLE-3 head (arXiv 2503.01840): what it is taught, how it is judged, what it is saved as.

It learns the target's distribution over the draft vocabulary at every level of a draft,

    loss = sum over levels k of decay^k * mean of -sum_x p(x) log q_k(x),

where p is the target's, over the tokens that can be drafted. As log q(x) = h . w_x - log sum_y exp(h . w_y),
all that is needed of p is the mean row sum_x p(x) w_x, once for all levels. (With a bias of the target's
head the loss lacks a constant.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError
from gammaray.training.batches import Batch, Texts
from gammaray.training.eagle3_module import HeadModule, Shape
from gammaray.training.heads import write
from gammaray.training.ttt import ahead, unroll

SAMPLE = 4096  # tokens that the features' scale is taken from


@dataclass(frozen=True, slots=True)
class Recipe:
    """Of one head. `layers`: of the target, as `ModelRunner.forward_features` counts."""

    shape: Shape
    layers: tuple[int, ...]
    depth: int = 4  # levels that are unrolled
    decay: float = 0.8  # weight of a level, over that of the one before it
    own_head: bool = False  # lm_head is the head's own and learns; else rows of the target's
    target: str = ""  # the hash of its weights, which the drafter is tied to

    def __post_init__(self) -> None:
        if self.depth < 1 or not 0 < self.decay <= 1:
            raise ConfigError("an EAGLE-3 head needs a depth of at least 1 and a decay above 0, at most 1")


class Eagle3Trainee:
    """Implements `gammaray.training.loop.Trainee`."""

    def __init__(self, recipe: Recipe, target: ModelRunner, tokens: Tensor, scale: Tensor) -> None:
        """`tokens` [Vd]: the draft vocabulary, ascending; `scale` [F]: see `HeadModule`."""
        self._recipe, self._target = recipe, target.telling
        self._told = (target.num_layers + 1,)
        self._tokens = tokens.to(target.device)
        self._known = torch.zeros(recipe.shape.vocab, dtype=torch.bool, device=target.device)
        self._known[self._tokens] = True
        rows, bias = target.telling.head_rows(self._tokens)  # [Vd, H], [Vd]
        self._rows, self._bias = rows.float(), None if bias is None else bias.float()
        own = self._rows if recipe.own_head else None
        self.module = HeadModule(recipe.shape, scale, own).to(target.device)

    @property
    def tables(self) -> list[nn.Parameter]:
        return [x for name, x in self.module.named_parameters() if name == "lm_head.weight"]

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        depth, decay = self._recipe.depth, self._recipe.decay
        following = ahead(batch.tokens, 1)  # [B, T]
        counted = ahead(batch.answers, 1) & self._known[following]
        counted[:, :depth] = False  # so that a draft of every level ends at each place that counts
        places = counted.flatten().nonzero()[:, 0]  # [M]
        wanted = self._mean_rows(batch, places)  # [M, H]
        total = wanted.new_zeros(())
        for level, states in enumerate(self._levels(batch)):
            told = self.module.norm(states.flatten(0, 1)[places - level - 1])  # [M, H]
            every = self._logits(told).logsumexp(-1)  # [M]
            total = total + decay**level * (every - (told.float() * wanted).sum(-1)).sum()
        return total, total.new_tensor(len(places) * sum(decay**level for level in range(depth)))

    def tally(self, batch: Batch) -> Tensor:
        """[depth, 2]: drafts that were right up to a level and have a token of the target there, and those
        of them that have this token, which coupled verification would accept."""
        reached = torch.ones_like(batch.answers)  # [B, T], of the draft that begins with this pair
        found = []
        for level, states in enumerate(self._levels(batch)):
            wanted = ahead(batch.tokens, level + 2)  # [B, T]
            tested = reached & ahead(batch.answers, level + 2)
            best = self._logits(self.module.norm(states[tested])).argmax(-1)  # [N]
            right = self._tokens[best] == wanted[tested]
            reached = torch.zeros_like(tested).masked_scatter(tested, right)
            found.append(torch.stack([tested.sum(), right.sum()]))
        return torch.stack(found).double()

    def figures(self, tally: Tensor) -> dict[str, float]:
        """alpha as math.md section 4 has it, of each level too, and tau of a chain of `depth`."""
        tested, right = tally.unbind(1)  # [depth] each
        shares = right / tested.clamp(min=1)
        named = {f"alpha_{level}": float(share) for level, share in enumerate(shares, 1)}
        whole = float(right.sum() / tested.sum().clamp(min=1))
        return {"alpha": whole, "tau": 1 + float(shares.cumprod(0).sum()), **named}

    def export(self, folder: Path) -> None:
        recipe = self._recipe
        read = [layer - 1 for layer in recipe.layers]  # SpecForge names the layers that wrote them
        config = recipe.shape.config() | {
            "draft_vocab_size": len(self._tokens),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": read, "use_aux_hidden_state": True},
            "dtype": "bfloat16",
        }
        offsets = self._tokens - torch.arange(len(self._tokens), device=self._tokens.device)
        tensors = {key: x.bfloat16() for key, x in self.module.tensors().items()}
        tensors |= {"d2t": offsets, "t2d": self._known}
        write(folder, config, tensors, recipe.target)

    def _levels(self, batch: Batch) -> Iterator[Tensor]:
        """What each level tells, [B, T, H] each."""
        with torch.no_grad():
            embedded = self._target.embed(batch.tokens.flatten()).float().unflatten(0, batch.tokens.shape)
        entered = self.module.enter(batch.states(self._recipe.layers))
        return unroll(self.module.midlayer, embedded, entered, self._recipe.depth)

    def _head(self) -> tuple[Tensor, Tensor | None]:
        """Rows [Vd, H] and bias [Vd] that the head's states are read with."""
        return (self.module.lm_head.weight, None) if self._recipe.own_head else (self._rows, self._bias)

    def _logits(self, told: Tensor) -> Tensor:
        """What the head says, [N, H], when its norm has seen it: [N, Vd]."""
        return F.linear(told, *self._head()).float()

    def _mean_rows(self, batch: Batch, places: Tensor) -> Tensor:
        """Rows of the head, weighted by what the target says behind M places: [M, H]."""
        with torch.no_grad():
            states = batch.states(self._told).flatten(0, 1)[places].float()  # [M, H]
            p = F.linear(states, self._rows, self._bias).float().softmax(-1)  # [M, Vd]
        return (p @ self._head()[0]).float()


def feature_scale(texts: Texts, layers: tuple[int, ...]) -> Tensor:
    """The mean size [F] of each number of the states that a head reads, and never 0."""
    taken, parts = 0, []
    for document in texts.learned():
        parts.append(texts.cache.document(document, layers).float().abs())
        if (taken := taken + len(parts[-1])) >= SAMPLE:
            break
    if not parts:
        raise ConfigError("there is nothing to learn from: write more documents")
    return torch.cat(parts).mean(0).clamp(min=1e-4)
