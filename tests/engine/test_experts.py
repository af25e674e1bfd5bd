"""Targets with a mixture of experts: who reaches them, and that the step profile knows what they cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.decoding import run
from support.tape import Letters
from tiny import tiny_llama, tiny_model
from torch import Tensor
from transformers import MixtralConfig, Qwen3MoeConfig

from gammaray.engine import profile
from gammaray.engine.batch import Row
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.loading import load_runner
from gammaray.engine.profile import StepProfile, measure
from gammaray.engine.runner import ModelRunner
from gammaray.engine.sim import SimClock
from gammaray.types import GenerateRequest, SamplingParams, SpeculationPlan

EXPERTS = 8
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (MixtralConfig, {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
}
LAYERS = 2
STEEP = StepProfile(((1, 1.0), (2, 1.05), (4, 1.2), (8, 1.9), (64, 15.0)))  # trims most of what is unlikely


def target(name: str) -> ModelRunner:
    config, shape = MODELS[name]
    return load_runner(tiny_model(config, layers=LAYERS, **shape), "float32", 4, 128, device="cpu")


@dataclass
class Gate:
    """Watches what arrives at the experts of all layers."""

    runner: ModelRunner
    arrived: int = 0
    touched: list[int] = field(default_factory=list)  # distinct experts, by pass and layer

    def __post_init__(self) -> None:
        modules = self.runner._model._model.modules()  # type: ignore[attr-defined]
        experts = [module for module in modules if type(module).__name__.endswith("Experts")]
        assert len(experts) == LAYERS
        for module in experts:
            module.register_forward_pre_hook(self._see)

    def _see(self, module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        states, chosen = args[:2]  # [T, H], [T, experts of a token]
        self.arrived += len(states)
        self.touched.append(len(chosen.unique()))


@pytest.mark.parametrize("name", MODELS)
def test_trimmed_nodes_never_reach_the_experts(name: str) -> None:
    """Catches a trim that only ignores nodes: their experts' weights would be read all the same."""
    runner = target(name)
    gate = Gate(runner)
    drafter = ModelDrafter(load_runner(tiny_llama(layers=1, seed=5), "float32", 4, 128, device="cpu"))
    options = EngineOptions(max_batch=4, token_budget=64, prefix_cache=False)
    engine = Engine(runner, Letters(), (), {"small": drafter}, options, profile=STEEP)
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    plan = SpeculationPlan("small", 4, 2, adaptive=True)
    batch = [GenerateRequest(str(i), (1 + i, 2, 3), sampling, plan) for i in range(3)]
    stats = [outcome.stats for outcome in run(engine, batch).values() if outcome.stats]
    verified, rounds = sum(s.verified for s in stats), sum(s.rounds for s in stats)
    assert 0 < verified < sum(s.drafted for s in stats) / 2
    assert gate.arrived == LAYERS * (3 * len(batch) + rounds + verified)  # prompts, roots, nodes


def touched(name: str, *sizes: int, ids: Any = profile._varied) -> list[int]:
    """Experts of the last layer in a measured pass over so many tokens."""
    runner = target(name)
    gate, vocab = Gate(runner), runner.vocab_size
    runner.forward(profile._firsts(runner, max(sizes), None))
    found = []
    for size in sizes:
        rows = profile._rows(runner, size, None)
        fed = iter(ids(vocab, size))
        runner.forward([Row([next(fed) for _ in row.pending], row.start, row.blocks) for row in rows])
        found.append(gate.touched[-1])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_measured_pass_touches_as_many_experts_as_traffic_does(name: str) -> None:
    draws = random.Random(0)
    found = touched(name, 1, 4, 16)
    traffic = touched(name, 1, 4, 16, ids=lambda vocab, size: draws.choices(range(vocab), k=size))
    assert found[0] == 2 and found[2] >= 7
    assert all(abs(a - b) <= 2 for a, b in zip(found, traffic, strict=True))
    runner = target(name)
    gate = Gate(runner)
    runner.forward([Row([3], 0, [row]) for row in range(16)])
    assert gate.touched[-1] == 2  # planted: one repeated token says that more tokens need no more experts


class Mixture:
    """A target whose pass takes as long as reading the experts that its tokens touch. First tokens of a
    sequence all choose the same ones, as they do in models whose attention rests on them."""

    num_blocks, block_size, vocab_size = 256, 4, 1000
    experts, chosen = 64, 4

    def __init__(self, clock: SimClock) -> None:
        self.clock = clock
        draws = random.Random(1)
        self.routes = [draws.sample(range(self.experts), self.chosen) for _ in range(self.vocab_size)]

    def forward(self, rows: Sequence[Row]) -> Tensor:
        found = set[int]()
        for row in rows:
            for position, token in enumerate(row.pending, row.start):
                found |= set(self.routes[token if position else 0])
        self.clock.advance(0.001 + 0.0001 * len(found))
        return torch.empty(0)

    def traffic(self, tokens: int) -> float:
        """Seconds of a pass in real traffic, in the mean: chosen of `experts`, independently."""
        return 0.001 + 0.0001 * self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)


def profiled() -> tuple[StepProfile, Mixture]:
    clock = SimClock()
    mixture = Mixture(clock)
    return measure(mixture, 64, clock), mixture


@pytest.mark.parametrize("plant", ["", "one token", "first tokens"])
def test_the_profile_includes_the_experts_that_more_tokens_touch(
    plant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a profile that calls a larger batch free: then nothing would ever be trimmed."""
    if plant == "one token":
        monkeypatch.setattr(profile, "_varied", lambda vocab, count: [7] * count)
    rows = profile._rows
    if plant == "first tokens":
        monkeypatch.setattr(
            profile, "_rows", lambda *args: [Row(row.pending, 0, row.blocks) for row in rows(*args)]
        )
    found, mixture = profiled()
    errors = [abs(seconds / mixture.traffic(tokens) - 1) for tokens, seconds in found.points]
    assert (max(errors) < 0.15) == (not plant)
    flat = all(a[1] == b[1] for a, b in pairwise(found.points))
    assert flat == bool(plant)
