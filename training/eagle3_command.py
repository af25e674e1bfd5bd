"""`gammaray train eagle`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gammaray.engine.loading import load_config, load_model
from gammaray.engine.runner import ModelRunner
from gammaray.training.batches import Texts
from gammaray.training.command import Asked, Kind
from gammaray.training.draft_vocab import choose
from gammaray.training.eagle3 import Eagle3Trainee, Recipe, feature_scale
from gammaray.training.eagle3_module import Shape
from gammaray.training.features import read_layers
from gammaray.training.warm import begin_with


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the head. `layers`: of the target, none for low, middle and high ones; `inner`: of the MLP, 0 for
    the target's; `draft_vocab`: tokens at most."""

    layers: tuple[int, ...] = ()
    depth: int = 4
    draft_vocab: int = 8192
    inner: int = 0
    own_head: bool = False
    warm: bool = True  # it begins with the target's last layer

    def reads(self, target: ModelRunner) -> tuple[int, ...]:
        """Raises ConfigError for layers that the target has not."""
        return read_layers(target, self.layers)


def kind(asked: Asked, sizes: Sizes) -> Kind:
    """Raises ConfigError."""
    config = load_config(asked.target)

    def build(target: ModelRunner, texts: Texts, weights: str) -> Eagle3Trainee:
        tokens = choose(texts.corpus.counts(target.vocab_size), min(sizes.draft_vocab, target.vocab_size))
        shape, layers = Shape.like(config, sizes.inner), sizes.reads(target)
        recipe = Recipe(shape, layers, sizes.depth, own_head=sizes.own_head, target=weights)
        trainee = Eagle3Trainee(recipe, target, tokens, feature_scale(texts, layers))
        if sizes.warm:
            begin_with(trainee.module, load_model(asked.target, target.dtype))
        return trainee

    return Kind(
        "eagle3",
        asdict(sizes),
        lambda target: (*sizes.reads(target), target.num_layers + 1),
        build,
    )
