"""The loop that every head is trained with: gradients over batches, checkpoints, held-out figures.

A run goes on from its newest checkpoint to the same losses that it would have had (on a CPU to the bit, as
long as the number of threads is the same): batches depend on the seed and the step alone, and nothing else
is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gammaray.errors import ConfigError
from gammaray.training import checkpoint
from gammaray.training.batches import Batch, Piece, Texts, endless, first, fitted
from gammaray.training.distributed import ALONE, World
from gammaray.training.optimizers import Optimizers
from gammaray.training.schedule import Schedule

LONGEST = 512  # tokens of a piece


class Trainee(Protocol):
    """A head that learns. `module` has all that a checkpoint keeps; what requires a gradient learns."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def tables(self) -> Sequence[nn.Parameter]:
        """Of `module`: what has a row for each token."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum over the batch, and the weight [] that it is of: sums of several batches are added up, then
        divided."""

    def tally(self, batch: Batch) -> Tensor:
        """Counts [M] float64 of a held-out batch, which are added up."""

    def figures(self, tally: Tensor) -> dict[str, float]:
        """What the counts say, by name."""

    def export(self, folder: Path) -> None:
        """The drafter as the engine loads it: config.json and model.safetensors."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is trained with. `tokens` and `longest` bound memory: a pass takes about their product."""

    schedule: Schedule
    seed: int = 0
    tokens: int = 2048  # of a pass, padding included
    longest: int = LONGEST
    passes: int = 1  # of a step: their gradients are added up
    clip: float = 1.0  # the norm of a step's gradient at most
    decay: float = 0.01  # of matrices
    save_every: int = 50  # steps
    judge_every: int = 200  # steps; held-out figures, also at the end
    judged: int = 32768  # held-out tokens at most
    bfloat16: bool = False  # matrix products in it; weights and what is added up stay float32

    def __post_init__(self) -> None:
        sizes = self.tokens, self.longest, self.passes, self.save_every, self.judge_every, self.judged
        if min(sizes) < 1 or self.clip <= 0 or self.longest > self.tokens:
            raise ConfigError("a pass needs tokens for its longest piece, and all sizes must be positive")

    @property
    def binding(self) -> dict[str, Any]:
        """What a checkpoint can only go on with; how often it is saved and judged may change."""
        free = ("save_every", "judge_every", "judged", "schedule")
        named = {key: value for key, value in asdict(self).items() if key not in free}
        return named | {"steps": self.schedule.steps, "rate": self.schedule.rate}


@dataclass(frozen=True, slots=True)
class Step:
    """One step, once it is done."""

    number: int  # the first is 1
    done: float  # share of the way; 1: this was the last
    loss: float  # mean of the batches of this step, before it
    rate: float
    norm: float  # of the gradient, before it was clipped
    figures: Mapping[str, float] = field(default_factory=dict)  # held out; empty: not judged here
    saved: bool = False


class Trainer:
    """One run in one process. `folder` holds the checkpoints."""

    def __init__(
        self,
        trainee: Trainee,
        texts: Texts,
        options: Options,
        folder: Path,
        world: World = ALONE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Goes on from the newest checkpoint in `folder`. Raises ConfigError when that is of another run."""
        self.trainee, self.options = trainee, options
        self.number, self.done, self.seconds = 0, 0.0, 0.0
        self._texts, self._folder, self._world, self._clock = texts, folder, world, clock
        self._learning = [x for x in trainee.module.parameters() if x.requires_grad]
        self._device = self._learning[0].device
        self._optimizers = Optimizers(trainee.module, trainee.tables, options.decay)
        self._pieces = texts.pieces(texts.learned(), options.longest)
        self._run = options.binding | {"pieces": len(self._pieces), "world": world.size}
        if (found := checkpoint.newest(folder)) is not None:
            self._restore(found)

    def steps(self, stopping: Callable[[], bool] = lambda: False) -> Iterator[Step]:
        """Train to the end, a step per `next`; asked to stop, it saves behind the step that it is in, and
        ends."""
        batches = self._batches()
        while self.done < 1:
            began = self._clock()
            rate = self.options.schedule.rate_at(self.done)
            loss, norm, stop = self._step(rate, [next(batches) for _ in range(self.options.passes)], stopping)
            self._advance(self._clock() - began)
            ended = stop or self.done == 1
            due = self.done == 1 or self.number % self.options.judge_every == 0
            figures = self.judge() if due else {}
            if saving := ended or self.number % self.options.save_every == 0:
                self._save()
            yield Step(self.number, self.done, loss, rate, norm, figures, saving)
            if stop:
                return

    @torch.no_grad()
    def judge(self) -> dict[str, float]:
        """Figures of held-out documents, the same ones each time."""
        held = self._texts.pieces(self._texts.held_out(), self.options.longest)
        if not held or self._world.rank:  # the others wait for the first in the next step
            return {}
        batches = fitted(first(held, self.options.judged), self.options.tokens)
        with self._precision():
            tallies = [self.trainee.tally(self._texts.batch(part, self._device)) for part in batches]
        return self.trainee.figures(torch.stack(tallies).sum(0))

    # A step ------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[list[Piece]]:
        """Those of this process, from the step on that comes next."""
        every = endless(self._pieces, self.options.tokens, self.options.seed)
        begin = self.number * self.options.passes * self._world.size + self._world.rank
        return islice(every, begin, None, self._world.size)

    def _step(
        self, rate: float, parts: list[list[Piece]], stopping: Callable[[], bool]
    ) -> tuple[float, float, bool]:
        """Loss, norm of the gradient, and whether any process was asked to stop."""
        self._optimizers.zero_grad()
        sums = torch.zeros(3, device=self._device)  # loss, weight, stopping
        for part in parts:
            with self._precision():
                loss, weight = self.trainee.loss(self._texts.batch(part, self._device))
            loss.backward()
            sums[:2] += torch.stack([loss.detach(), weight.to(loss)])
        sums[2] += stopping()
        gradients = [x.grad if x.grad is not None else torch.zeros_like(x) for x in self._learning]
        self._world.sum([*gradients, sums])
        for x, gradient in zip(self._learning, gradients, strict=True):
            x.grad = gradient.div_(sums[1].clamp(min=1e-6))
        norm = nn.utils.clip_grad_norm_(self._learning, self.options.clip)
        self._optimizers.step(rate)
        mean = float(sums[0] / sums[1].clamp(min=1e-6))
        if not isfinite(mean):
            raise ConfigError(f"the loss of step {self.number + 1} is {mean}: begin anew, with a lower rate")
        return mean, float(norm), bool(sums[2])

    def _advance(self, seconds: float) -> None:
        """By a step, all processes as far as the others."""
        mean = torch.tensor([seconds / self._world.size], dtype=torch.float64, device=self._device)
        self._world.sum([mean])
        self.done = self.options.schedule.after(self.done, float(mean))
        self.number, self.seconds = self.number + 1, self.seconds + float(mean)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self.options.bfloat16)

    # Checkpoints -------------------------------------------------------------------------------------

    def _save(self) -> None:
        if self._world.rank == 0:
            state = {
                "run": self._run,
                "number": self.number,
                "done": self.done,
                "seconds": self.seconds,
                "module": self.trainee.module.state_dict(),
                "optimizers": self._optimizers.state_dict(),
            }
            checkpoint.save(self._folder, self.number, state)
        self._world.wait()

    def _restore(self, state: Mapping[str, Any]) -> None:
        known = state.get("run", {})
        if changed := [name for name, value in self._run.items() if known.get(name) != value]:
            said = ", ".join(f"{name} {known.get(name)} is now {self._run[name]}" for name in changed)
            place = self._folder.parent
            raise ConfigError(f"{place} cannot go on: {said}; give what it began with, or a new folder")
        try:
            self.trainee.module.load_state_dict(state["module"])
            self._optimizers.load_state_dict(state["optimizers"])
            self.number, self.done, self.seconds = state["number"], state["done"], state["seconds"]
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the checkpoints in {self._folder} are of another head: take a new folder"
            ) from error
