"""A tiny target, what it wrote, and its states: what heads learn from in tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from gammaray.engine.runner import ModelRunner
from gammaray.training.batches import Texts
from gammaray.training.corpus import Corpus, Document, seal
from gammaray.training.features import Cache, fill

ASKED = 2  # tokens of a prompt


@torch.no_grad()
def written(model: PreTrainedModel, documents: int, length: int, temperature: float = 0.0) -> list[list[int]]:
    """Random prompts, and what the target goes on with."""
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(model.config.vocab_size, (documents, ASKED), generator=draw)
    while tokens.shape[1] < length:
        logits = model(input_ids=tokens, use_cache=False).logits[:, -1]
        if temperature:
            following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=draw)
        else:
            following = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], 1)
    found: list[list[int]] = tokens.tolist()
    return found


def texts(folder: Path, runner: ModelRunner, documents: list[list[int]], layers: tuple[int, ...]) -> Texts:
    seal(folder / "corpus", [Document.answered(one[:ASKED], one[ASKED:]) for one in documents])
    corpus = Corpus.open(folder / "corpus")
    for _ in fill(folder / "states", corpus, runner, "t", layers):
        pass
    return Texts(corpus, Cache(folder / "states", corpus))
