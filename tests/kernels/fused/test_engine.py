"""The engine's own path through the fused kernels, interpreted: what a GPU runs, but for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import tiny_llama, tiny_model
from torch import Tensor
from transformers import MistralConfig, Qwen3Config

from gammaray.engine.batch import Row, StepSizes
from gammaray.engine.hf import HuggingFaceModel
from gammaray.engine.lean import LeanModel
from gammaray.engine.loading import load_runner
from gammaray.engine.runner import ModelRunner
from gammaray.kernels.backend import VARIABLE
from gammaray.kernels.fused import launch, move, rope

MODELS = {
    "lean": lambda: tiny_llama(),
    "qwen3": lambda: tiny_model(Qwen3Config, head_dim=8),
    "window": lambda: tiny_model(MistralConfig, sliding_window=5),
}
PREFILL = [Row([3, 1, 4, 1, 5], 0, [2, 0]), Row([9, 2], 0, [3])]
VERIFY = [Row([6], 5, [2, 0, 5], [5, 3, 5], [-1, 0, 0]), Row([8], 2, [3, 4], [7, 9], [-1, -1])]
MOVED = ([1, 15], [0, 14])  # within blocks 0 and 3


class Calls:
    """Counts calls of the fused kernels' launchers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        for module, name in ((launch, "paged_tree_attention"), (rope, "rotate_and_write"), (move, "move_kv")):
            monkeypatch.setattr(module, name, self._watched(getattr(module, name), name))

    def _watched(self, launcher: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            self.seen.append(name)
            return launcher(*args, **options)

        return watched


def rounds(runner: ModelRunner) -> list[Tensor]:
    """Logits of a prefill, of a verification, and of a decode after two nodes moved."""
    found = [runner.forward(PREFILL), runner.forward(VERIFY)]
    runner.move(*MOVED)
    return [*found, runner.forward([Row([1], 6, [2, 0, 5])])]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setenv(VARIABLE, "fused")
    return Calls(monkeypatch)


@pytest.mark.parametrize("name", MODELS)
def test_fused_passes_agree_with_torch(name: str, fused: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a seam that loses a layer, a slot or an angle; both paths pass the check at load as well."""
    model = MODELS[name]()
    runner = load_runner(model, "float32", 4, 8, device="cpu")
    assert isinstance(runner._model, LeanModel)
    fused.seen.clear()
    found = rounds(runner)
    assert (
        fused.seen
        == [*["rotate_and_write", "paged_tree_attention"] * 4, "move_kv"]
        + [
            "rotate_and_write",
            "paged_tree_attention",
        ]
        * 2
    )
    monkeypatch.setenv(VARIABLE, "torch")
    expected = rounds(load_runner(model, "float32", 4, 8, device="cpu"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_padded_passes_agree_too(fused: Calls) -> None:
    """Catches a kernel that reads the rows and tokens that pad a bucket."""

    class Again:
        def record(self, work: Callable[[], None]) -> Callable[[], None]:
            return work

    plain, padded = (load_runner(tiny_llama(), "float32", 4, 8, device="cpu") for _ in range(2))
    for pool in (x for pair in padded._pool.layers for x in pair):
        pool.fill_(float("nan"))
    padded.record([StepSizes(12, 4, 12, 4)], Again())
    for one, other in zip(rounds(padded), rounds(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_other_models_take_the_kernel_without_the_rotation(
    fused: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gammaray.engine.loading.has_lean_form", lambda config: False)
    runner = load_runner(tiny_llama(), "float32", 4, 8, device="cpu")
    assert isinstance(runner._model, HuggingFaceModel)
    fused.seen.clear()
    runner.forward(PREFILL)
    assert fused.seen == ["paged_tree_attention"] * 2
