"""From a command line to a drafter in a run folder: what all heads have in common.

run.json      what the run was begun with; made.json: what came of it
data/         what heads learn from (`gather.py`), which other runs may use too
checkpoint/   the newest two
out/          the drafter
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path
from typing import Any

import torch

from gammaray.engine import identity
from gammaray.engine.bench.machine import machine
from gammaray.engine.loading import load_runner, load_tokenizer
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError
from gammaray.training import gather
from gammaray.training.bars import Bars, told
from gammaray.training.batches import Texts, shuffled
from gammaray.training.distributed import World, joined
from gammaray.training.files import bind, held, replacing
from gammaray.training.gather import Data
from gammaray.training.heads import check_projects
from gammaray.training.loop import LONGEST, Options, Trainee, Trainer
from gammaray.training.schedule import Schedule
from gammaray.training.selfplay import Play
from gammaray.training.stopping import stopping
from gammaray.training.writer import Writer

BLOCKS = 2048  # of the target's KV pool while it writes and reads: about 64 texts of 512 tokens
RUN, MADE = "run.json", "made.json"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command of every head takes. `data`: the folder of another run's data, instead of its own."""

    target: str
    run: Path
    data: Path | None = None
    prompts: Path | None = None  # None: the target asks itself
    tokens: int = 400_000  # that the target writes
    temperatures: tuple[float, ...] = Play().temperatures
    epochs: float = 4.0
    minutes: float | None = None
    rate: float = 8e-3
    seed: int = 0
    dtype: str = "auto"
    pass_tokens: int = 2048
    passes: int = 1
    bfloat16: bool = False

    def __post_init__(self) -> None:
        """Before the target writes, which takes long."""
        Schedule(1, self.minutes, self.rate)
        if not (isfinite(self.epochs) and self.epochs > 0):
            raise ConfigError(f"--epochs {self.epochs}: give a number above 0")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed}: give a number from 0 to 2^63 - 1")

    @property
    def settings(self) -> dict[str, Any]:
        """For run.json: all of it but where it is."""
        return {
            name: getattr(self, name) for name in self.__slots__ if name not in ("run", "data", "prompts")
        }

    @property
    def place(self) -> Path:
        """Of the data."""
        return self.data or self.run / "data"

    def options(self, texts: Texts, processes: int = 1) -> Options:
        """With the steps that the epochs come to. Raises ConfigError when there is nothing to learn from."""
        longest = min(LONGEST, self.pass_tokens)
        pieces = texts.pieces(texts.learned(), longest)
        if not pieces:
            raise ConfigError("there is nothing to learn from: ask for more tokens")
        batches = len(shuffled(pieces, self.pass_tokens, self.seed))
        return Options(
            Schedule(
                max(1, ceil(self.epochs * batches / (self.passes * processes))), self.minutes, self.rate
            ),
            seed=self.seed,
            tokens=self.pass_tokens,
            longest=longest,
            passes=self.passes,
            bfloat16=self.bfloat16,
        )


@dataclass(frozen=True, slots=True)
class Kind:
    """What one kind of head needs."""

    method: str
    settings: Mapping[str, Any]  # for run.json
    layers: Callable[[ModelRunner], Sequence[int] | None]  # whose states it learns from; None: the usual ones
    build: Callable[[ModelRunner, Texts, str], Trainee]  # the last: the hash of the target's weights
    # What is done to the drafter in a folder once it is trained; returns held-out figures.
    finish: Callable[[ModelRunner, Texts, Path], Mapping[str, float]] = lambda runner, texts, folder: {}


def train(asked: Asked, kind: Kind, as_json: bool, again: str) -> int:
    """The exit code: 0 when the drafter is in out/, 1 when the run was stopped before. `again`: how to go on.

    Raises ConfigError, EngineFailure.
    """
    try:
        with joined() as world, _alone(asked.run, world), Bars(hidden=world.rank > 0) as bars:
            made = _train(asked, kind, world, bars)
    except KeyboardInterrupt:
        made = None
    if made is None:
        print(f"stopped; to go on: {again}", file=sys.stderr)
        return 1
    if world.rank == 0:
        print(json.dumps(made) if as_json else f"{asked.run / 'out'}: {told(made['held_out'])}")
    return 0


def _alone(run: Path, world: World) -> AbstractContextManager[None]:
    """No other run is in the folder: the first process sees to it."""
    return held(run) if world.rank == 0 else nullcontext()


def _train(asked: Asked, kind: Kind, world: World, bars: Bars) -> dict[str, Any] | None:
    """What came of it; None: it was stopped."""
    target = identity.of(asked.target)
    if world.rank == 0:
        about = {"method": kind.method, "target_sha256": target}
        bind(asked.run / RUN, {**about, **asked.settings, **kind.settings})
    runner = load_runner(asked.target, asked.dtype, num_blocks=BLOCKS)
    layers = kind.layers(runner)
    check_projects(runner)
    if world.rank == 0:
        _gather(asked, runner, target, layers, bars)
    world.wait()  # for the first, which makes the data of all
    texts = gather.texts(asked.place, asked.tokens)
    torch.manual_seed(asked.seed)  # of the weights that it begins with
    trainee, options = kind.build(runner, texts, target), asked.options(texts, world.size)
    trainer = Trainer(trainee, texts, options, asked.run / "checkpoint", world)
    with stopping() as stop:
        for step in trainer.steps(stop):
            bars.step(step, options.schedule.steps)
    if trainer.done < 1:
        return None
    made = _made(trainer, texts)
    if world.rank == 0:
        trainee.export(asked.run / "out")
        made["held_out"] |= kind.finish(runner, texts, asked.run / "out")
        with replacing(asked.run / MADE) as work:
            work.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return made


def _gather(asked: Asked, runner: ModelRunner, target: str, layers: Sequence[int] | None, bars: Bars) -> None:
    play = Play(asked.seed, temperatures=asked.temperatures)
    wanted = Data(asked.tokens, asked.prompts, play, None if layers is None else tuple(layers))
    writer = Writer(runner, load_tokenizer(asked.target))
    for progress in gather.gather(asked.place, writer, target, wanted):
        bars.note(progress.what, progress.done, progress.total)


def _made(trainer: Trainer, texts: Texts) -> dict[str, Any]:
    """For the card."""
    return {
        "documents": len(texts.corpus),
        "tokens": texts.corpus.tokens,
        "steps": trainer.number,
        "hours": trainer.seconds / 3600,
        "hardware": machine(),
        "held_out": trainer.judge(),
    }
