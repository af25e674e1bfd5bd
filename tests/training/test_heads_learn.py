"""Medusa heads and block drafters learn, go on exactly, and say in the engine what they said in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support import learning
from tiny import tiny_llama, tiny_model
from torch import nn
from transformers import Gemma3TextConfig, PreTrainedModel

from gammaray import drafter_config
from gammaray.engine.batch import Row
from gammaray.engine.drafters import registry
from gammaray.engine.drafters.base import Drafter, DraftView
from gammaray.engine.loading import load_runner
from gammaray.engine.runner import ModelRunner
from gammaray.training.batches import Batch, Texts
from gammaray.training.confidence import ConfidenceTrainee
from gammaray.training.dspark import DsparkTrainee, Sizes, settings
from gammaray.training.loop import Options, Trainee, Trainer
from gammaray.training.medusa import MedusaTrainee
from gammaray.training.schedule import Schedule
from gammaray.types import SamplingParams

VOCAB, LAYERS = 24, (1, 3, 5)  # of 4 layers; 5: what the head reads
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@dataclass(frozen=True)
class World:
    model: PreTrainedModel
    runner: ModelRunner
    texts: Texts


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    model = tiny_llama(VOCAB, layers=4, max_position_embeddings=96)
    runner = load_runner(model, "float32", block_size=4, num_blocks=64)
    documents = learning.written(model, documents=60, length=48, temperature=1.0)
    return World(model, runner, learning.texts(tmp_path_factory.mktemp("data"), runner, documents, LAYERS))


def medusa(world: World, own: bool = True) -> Trainee:
    return MedusaTrainee(world.runner, heads=3, layers=2, own_vocabulary=own)


def dspark(world: World, draft_vocab: int = VOCAB, **sizes: Any) -> DsparkTrainee:
    torch.manual_seed(0)
    shape = Sizes(block=4, depth=1, rank=8, **sizes)
    config = settings(world.model.config, LAYERS[:2], shape, draft_vocab, mask_token=VOCAB - 1)
    return DsparkTrainee(world.runner, config, torch.arange(VOCAB)[-draft_vocab:])


MAKERS: dict[str, Callable[[World], Trainee]] = {
    "medusa": medusa,
    "medusa, blocks only": lambda world: medusa(world, own=False),
    "dspark": dspark,
    "dspark, gated, few tokens": lambda world: dspark(world, 16, markov="gated"),
    "dspark, rnn": lambda world: dspark(world, markov="rnn"),
}


def trainer(world: World, trainee: Trainee, folder: Path, steps: int = 80) -> Trainer:
    options = Options(Schedule(steps, rate=4e-2), tokens=512, longest=48, save_every=3, judge_every=1000)
    return Trainer(trainee, world.texts, options, folder)


@pytest.mark.parametrize("name", ["medusa", "dspark"])
def test_loss_falls_and_held_out_agreement_rises(world: World, tmp_path: Path, name: str) -> None:
    training = trainer(world, MAKERS[name](world), tmp_path)
    before = training.judge()
    losses = [step.loss for step in training.steps()]
    after = training.judge()
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert all(after[f"overlap_{place}"] > before[f"overlap_{place}"] + 0.1 for place in (1, 2, 3)), after
    agreed = [sum(found[f"agreed_{place}"] for place in (1, 2, 3)) for found in (before, after)]
    assert agreed[1] > agreed[0] + 0.15, (before, after)


@pytest.mark.parametrize("name", ["medusa", "dspark"])
def test_a_run_goes_on_to_the_same_losses(world: World, tmp_path: Path, name: str) -> None:
    """Also where blocks begin is drawn as it would have been."""
    whole = [step.loss for step in islice(trainer(world, MAKERS[name](world), tmp_path / "a").steps(), 6)]
    first = [step.loss for step in islice(trainer(world, MAKERS[name](world), tmp_path / "b").steps(), 5)]
    again = [step.loss for step in islice(trainer(world, MAKERS[name](world), tmp_path / "b").steps(), 3)]
    assert first == whole[:5] and again == whole[3:], "5 steps were done and 3 saved"


@pytest.mark.parametrize("name", MAKERS)
def test_the_engine_drafts_what_was_trained(world: World, tmp_path: Path, name: str) -> None:
    """Tokens and confidences of a chain, of weights that are all random."""
    trainee = MAKERS[name](world)
    scatter(trainee.module)
    trainee.export(tmp_path)
    tokens, sure = (said_by_medusa if name.startswith("medusa") else said_by_dspark)(world, trainee)
    drafter = made(world, tmp_path, name.partition(",")[0])
    tree = drafter.collect(drafter.begin([fed(world, drafter, TEXT)]), 0.0)["r"]
    assert list(tree.tokens) == tokens and tree.confidence == pytest.approx(sure, abs=1e-4)


def scatter(module: nn.Module) -> None:
    """Weights that all matter, and that bfloat16 can tell."""
    draw = torch.Generator().manual_seed(2)
    for name, x in module.named_parameters():
        scale = 1.0 if "markov" in name else 0.3
        noise = scale * torch.randn(x.shape, generator=draw)
        x.data = (noise + (1 if "norm" in name else 0) if x.requires_grad else x.data).bfloat16().float()


def made(world: World, folder: Path, method: str) -> Drafter:
    kinds = {"medusa": drafter_config.MedusaDrafter, "dspark": drafter_config.DsparkDrafter}
    config = kinds[method](method=method, path=str(folder))  # type: ignore[arg-type]
    return registry.make(registry.Making("d", config, world.runner, "t", None))  # type: ignore[arg-type]


def fed(world: World, drafter: Any, tokens: list[int]) -> DraftView:
    """The drafter knows these tokens; what to ask it."""
    told = states(world, tokens, drafter.layers)
    drafter.catch_up("r", tokens[:1])
    drafter.commit("r", tokens[1:], told[:-1])
    return DraftView("r", len(tokens), 8, 1, SamplingParams(temperature=0.0), 0)


def states(world: World, tokens: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    rows = [Row(tokens, 0, range(-(-len(tokens) // world.runner.block_size)))]
    return world.runner.forward_features(rows, layers)[1]


@torch.no_grad()
def said_by_medusa(world: World, trainee: Trainee) -> tuple[list[int], list[float]]:
    state = states(world, TEXT, LAYERS[2:])[-2:-1]
    told = torch.cat([head(state) for head in trainee.module]).softmax(-1)  # type: ignore[union-attr]
    return told.argmax(-1).tolist(), told.amax(-1).tolist()


@torch.no_grad()
def said_by_dspark(world: World, trainee: Trainee) -> tuple[list[int], list[float]]:
    """The module drafts place by place, each read as if the text had gone on with what was drafted. Beside it
    is a block further on, whose context and tokens are not to be seen."""
    module: Any = trainee.module.drafter
    features, text = states(world, [*TEXT, 7, 7, 7, 7], LAYERS[:2]), list(TEXT)
    anchors = torch.tensor([len(TEXT) - 1, len(TEXT) + 2])
    for place in range(4):
        told = module(torch.tensor([*text, 0, 0, 0, 0]), features, anchors)
        column = int(told.logits[0, place].argmax())
        text.append(column + VOCAB - told.logits.shape[-1])
    return text[len(TEXT) :], told.confidence[0].sigmoid().tolist()


def test_the_confidence_head_alone_learns_to_tell_the_overlap(world: World, tmp_path: Path) -> None:
    """1 - TV, not TV, of held-out texts too; and nothing else of the drafter changes."""
    trainee = dspark(world)
    scatter(trainee.module)
    trainee.export(tmp_path / "drafter")
    alone = ConfidenceTrainee(world.runner, tmp_path / "drafter")
    before = {name: x.clone() for name, x in alone.module.state_dict().items()}
    losses = [step.loss for step in trainer(world, alone, tmp_path / "run", steps=40).steps()]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    batch = world.texts.batch(world.texts.pieces(world.texts.held_out(), 48), torch.device("cpu"))
    figures = alone.figures(alone.tally(batch))
    overlap = sum(figures[f"overlap_{place}"] for place in range(1, 5)) / 4
    with torch.no_grad():
        anchors = torch.arange(1, 44, 4)
        told = [alone.module.drafter(one, states, anchors).confidence for one, states in texts_of(batch)]
    assert float(torch.stack(told).sigmoid().mean()) == pytest.approx(overlap, abs=0.1)
    changed = {name for name, x in alone.module.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {"drafter.confidence_head.proj.weight", "drafter.confidence_head.proj.bias", "drawn"}


def texts_of(batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens [T] and what the drafter reads [T, F]."""
    return zip(batch.tokens, batch.states(LAYERS[:2]), strict=True)


def test_a_target_whose_embeddings_are_scaled_is_learned_from_for_more_than_a_step(tmp_path: Path) -> None:
    """Gemma scales them where they are looked up; the graph of that is gone after the first step."""
    model = tiny_model(Gemma3TextConfig, VOCAB, layers=4, head_dim=8, max_position_embeddings=96)
    runner = load_runner(model, "float32", block_size=4, num_blocks=64)
    documents = learning.written(model, documents=21, length=12)
    scaled = World(model, runner, learning.texts(tmp_path, runner, documents, LAYERS))
    options = Options(Schedule(2), tokens=64, longest=32)
    steps = list(Trainer(dspark(scaled), scaled.texts, options, tmp_path / "run").steps())
    assert [step.number for step in steps] == [1, 2]
