"""One run that trains a tiny EAGLE-3 head, the same in every process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tiny import tiny_llama
from transformers import PreTrainedModel

from gammaray.engine.loading import load_runner
from gammaray.engine.runner import ModelRunner
from gammaray.training.batches import Texts
from gammaray.training.corpus import Corpus
from gammaray.training.distributed import ALONE, World, joined
from gammaray.training.draft_vocab import choose
from gammaray.training.eagle3 import Eagle3Trainee, Recipe, feature_scale
from gammaray.training.eagle3_module import Shape
from gammaray.training.features import Cache
from gammaray.training.loop import Options, Trainer
from gammaray.training.schedule import Schedule
from support import learning

VOCAB, DRAFTED, LAYERS = 32, 28, (1, 2, 3)  # of 4 layers
KEPT = (*LAYERS, 5)  # 5: what the head reads


@dataclass(frozen=True)
class Taught:
    model: PreTrainedModel
    runner: ModelRunner
    texts: Texts

    def trainee(self, depth: int = 4, own_head: bool = False, target: str = "") -> Eagle3Trainee:
        torch.manual_seed(0)
        shape = Shape.like(self.model.config)
        recipe = Recipe(shape, LAYERS, depth, own_head=own_head, target=target)
        tokens = choose(self.texts.corpus.counts(VOCAB), DRAFTED)
        return Eagle3Trainee(recipe, self.runner, tokens, feature_scale(self.texts, LAYERS))

    def trainer(self, folder: Path, steps: int = 80, passes: int = 1, world: World = ALONE) -> Trainer:
        schedule = Schedule(steps, rate=5e-3)
        options = Options(schedule, tokens=480, longest=48, passes=passes, save_every=2, judge_every=1000)
        return Trainer(self.trainee(), self.texts, options, folder, world)


def target() -> PreTrainedModel:
    """Its next token depends on the last one more than on others, so that a few seconds teach a head much."""
    model = tiny_llama(VOCAB, layers=4, hidden_size=64, intermediate_size=96, initializer_range=0.1)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(6)
        model.get_input_embeddings().weight.mul_(10)
    return model


def taught(folder: Path) -> Taught:
    """With the data in `folder`, which are written there when they are not there yet."""
    model = target()
    runner = load_runner(model, "float32", block_size=16, num_blocks=64)
    if (folder / "corpus").is_dir():
        corpus = Corpus.open(folder / "corpus")
        return Taught(model, runner, Texts(corpus, Cache(folder / "states", corpus)))
    documents = learning.written(model, documents=200, length=48, temperature=0.5)
    return Taught(model, runner, learning.texts(folder, runner, documents, KEPT))


def train(data: Path, run: Path) -> None:
    """Without an end, as far as anybody will wait."""
    torch.set_num_threads(1)
    for _ in taught(data).trainer(run, steps=10_000).steps():
        pass


def share(data: Path, run: Path, steps: int, environment: dict[str, str]) -> None:
    """One process of several; each leaves its weights."""
    torch.set_num_threads(1)
    with joined(environment) as world:
        trainer = taught(data).trainer(run, steps, world=world)
        losses = [step.loss for step in trainer.steps()]
        state = {"losses": losses, "module": trainer.trainee.module.state_dict()}
        torch.save(state, run.with_suffix(f".{world.rank}"))
