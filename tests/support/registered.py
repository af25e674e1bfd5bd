"""Every registered drafter, made from a configuration for one tiny target, for the losslessness suite.

A method without an entry here fails the suite, so that none can be added without passing it. The vocabulary
is so small that even heads of random weights are right often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiny import tiny_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from gammaray.config import Config, parse

VOCAB = 12
LAYERS = 4
LENGTH = 96
EOS = VOCAB - 1


def target() -> PreTrainedModel:
    return tiny_llama(VOCAB, layers=LAYERS, max_position_embeddings=LENGTH)


def save(folder: Path, model: PreTrainedModel) -> str:
    """A checkpoint with the tokenizer that all share; returns its name as a model."""
    vocab = {f"w{i}": i for i in range(VOCAB)}
    core = Tokenizer(WordLevel(vocab, unk_token="w0"))
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=f"w{EOS}").save_pretrained(folder)
    return str(folder)


Drafters = dict[str, dict[str, Any]]  # by name: an entry of the configuration


def ngram(folder: Path) -> Drafters:
    return {"ngram": {"method": "ngram", "max_ngram": 3, "min_ngram": 1}}


def model(folder: Path) -> Drafters:
    small = save(folder / "small", tiny_llama(VOCAB, layers=1, seed=5, max_position_embeddings=LENGTH))
    named = {"method": "model", "model": small, "dtype": "float32"}
    return {"model": named, "model-sampled": {**named, "draft_sampling": True}}


# By method: drafters in every form that matters, one named after the method. `folder` is theirs to fill.
FORMS: Mapping[str, Callable[[Path], Drafters]] = {
    "ngram": ngram,
    "model": model,
}


def configuration(folder: Path) -> Config:
    """The target, and all forms of all methods."""
    drafters: Drafters = {}
    for method, forms in FORMS.items():
        (folder / method).mkdir()
        drafters |= forms(folder / method)
    return parse(
        {
            "target": {
                "model": save(folder / "target", target()),
                "dtype": "float32",
                "kv": {"num_blocks": 96, "block_size": 4},
            },
            "drafters": drafters,
        },
        "test",
    )
