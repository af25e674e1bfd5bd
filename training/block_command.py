"""`gammaray train dspark`, `train confidence` and `train medusa`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gammaray.engine.drafters.block_config import parse
from gammaray.engine.drafters.head_loading import folder_of, read_config
from gammaray.engine.loading import load_config
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError
from gammaray.papers import sha256
from gammaray.training import dspark
from gammaray.training.batches import Texts
from gammaray.training.calibration import calibrate
from gammaray.training.command import Asked, Kind
from gammaray.training.confidence import ConfidenceTrainee
from gammaray.training.draft_vocab import choose
from gammaray.training.dspark import DsparkTrainee, Sizes
from gammaray.training.features import read_layers
from gammaray.training.medusa import MedusaTrainee

SIZES = Sizes()


@dataclass(frozen=True, slots=True)
class Block:
    """Of a block drafter. `layers`: of the target, none for low, middle and high ones; `draft_vocab`: tokens
    at most; `mask`: the token that stands for those to come, -1 for the vocabulary's last."""

    layers: tuple[int, ...] = ()
    draft_vocab: int = 8192
    mask: int = -1
    sizes: Sizes = SIZES

    def reads(self, target: ModelRunner) -> tuple[int, ...]:
        """Raises ConfigError for layers that the target has not, and a mask that is no token."""
        if not -1 <= self.mask < target.vocab_size:
            raise ConfigError(f"mask {self.mask}: the target's tokens are 0 to {target.vocab_size - 1}")
        return read_layers(target, self.layers)


@dataclass(frozen=True, slots=True)
class Medusa:
    heads: int = 4
    layers: int = 1  # residual blocks of each
    own_vocabulary: bool = False  # heads learn projections of their own


def block(asked: Asked, wanted: Block) -> Kind:
    """Raises ConfigError."""
    config = load_config(asked.target)

    def build(target: ModelRunner, texts: Texts, weights: str) -> DsparkTrainee:
        size = target.vocab_size
        tokens = choose(texts.corpus.counts(size), min(wanted.draft_vocab, size))
        settings = dspark.settings(
            config, wanted.reads(target), wanted.sizes, len(tokens), wanted.mask % size
        )
        return DsparkTrainee(target, settings, tokens, weights)

    return Kind(
        "dspark",
        asdict(wanted),
        lambda target: (*wanted.reads(target), target.num_layers + 1),
        build,
        calibrate,
    )


def confidence(drafter: str) -> Kind:
    """`drafter`: a folder or a Hugging Face id. Raises ConfigError."""
    folder = folder_of(drafter)
    layers = parse(read_config(folder), drafter).layers
    weights = [sha256(file) for file in sorted(folder.glob("*.safetensors"))]
    return Kind(
        "dspark",
        {"confidence_of": weights},
        lambda target: (*layers, target.num_layers + 1),
        lambda target, texts, hash_: ConfidenceTrainee(target, folder, hash_),
        calibrate,
    )


def medusa(wanted: Medusa) -> Kind:
    return Kind(
        "medusa",
        asdict(wanted),
        lambda target: (target.num_layers + 1,),
        lambda target, texts, weights: MedusaTrainee(target, weights, **asdict(wanted)),
    )
