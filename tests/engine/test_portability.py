"""What other systems lack: oneDNN's private operators, CPU affinity, cgroups, bfloat16."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from tiny import tiny_llama

from gammaray.engine import threads
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.engine import Engine
from gammaray.engine.linear import PackedLinear
from gammaray.engine.loading import load_runner
from gammaray.engine.local import run
from gammaray.types import GenerateRequest, SamplingParams, SpeculationPlan


class Numbers:
    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


@pytest.fixture
def no_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch's builds for macOS: no operator is registered, and asking for one is an AttributeError."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())


def answers(dtype: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Plain and speculative tokens of one request, sampled."""
    runner = load_runner(tiny_llama(), dtype, num_blocks=40)
    assert runner.dtype is torch.float32
    engine = Engine(runner, Numbers(), drafters={"lookup": NgramDrafter()})  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=0.7, seed=3, max_tokens=40)
    plans = (SpeculationPlan(), SpeculationPlan("lookup", 4, 1))
    first, second = (run(engine, GenerateRequest("r", (1, 2, 3, 1, 2), sampling, plan)).ids for plan in plans)
    return first, second


def test_the_engine_runs_without_onednn(no_onednn: None) -> None:
    plain, speculative = answers("auto")
    assert len(plain) == 40
    assert plain == speculative


def test_without_onednn_no_layer_is_packed_and_the_tokens_are_the_same(
    request: pytest.FixtureRequest,
) -> None:
    packed = answers("float32")
    request.getfixturevalue("no_onednn")
    made: list[object] = []
    original = PackedLinear.__init__

    def note(self: PackedLinear, *weights: object) -> None:
        original(self, *weights)  # type: ignore[arg-type]
        made.append(self)

    request.getfixturevalue("monkeypatch").setattr(PackedLinear, "__init__", note)
    assert answers("float32") == packed
    assert made == []


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Four physical cores, no affinity, no cgroup."""
    monkeypatch.delattr(psutil.Process, "cpu_affinity", raising=False)
    monkeypatch.setattr(threads, "CGROUP", tmp_path / "none")
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8 if logical else 4)
    return monkeypatch


def test_cores_without_affinity_and_cgroups(bare: pytest.MonkeyPatch) -> None:
    assert threads.usable_cores() == 4


def test_cores_that_are_not_counted(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(psutil, "cpu_count", lambda logical: None)
    bare.setattr("os.cpu_count", lambda: 3)
    assert threads.usable_cores() == 3
    bare.setattr("os.cpu_count", lambda: None)
    assert threads.usable_cores() == 1


def fails(*_: object, **__: object) -> None:
    raise subprocess.CalledProcessError(1, "sysctl")


@pytest.mark.parametrize(
    ("answer", "cores"),
    [
        (lambda *_, **__: SimpleNamespace(stdout="2\n"), 2),
        (lambda *_, **__: SimpleNamespace(stdout=""), 4),
        (fails, 4),
    ],
)
def test_an_apple_chip_computes_with_its_fast_cores(
    bare: pytest.MonkeyPatch, answer: Callable[..., object], cores: int
) -> None:
    bare.setattr(subprocess, "run", answer)
    assert threads.usable_cores() == 4
    bare.setattr(sys, "platform", "darwin")
    assert threads.usable_cores() == cores
