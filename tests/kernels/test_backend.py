"""Which backend answers, and what is said where none can."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_llama

from gammaray.engine.loading import load_runner
from gammaray.errors import ConfigError
from gammaray.kernels import backend as module
from gammaray.kernels.backend import INTERPRET, VARIABLE, backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("value", "cpu", "cuda"),
    [
        (None, "torch", "fused"),
        ("", "torch", "fused"),
        ("auto", "torch", "fused"),
        ("torch", "torch", "torch"),
    ],
)
def test_triton_answers_on_gpus(
    value: str | None, cpu: str, cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert (backend(CPU), backend(CUDA)) == (cpu, cuda)


def test_kernels_on_a_cpu_are_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "fused")
    monkeypatch.delenv(INTERPRET, raising=False)
    with pytest.raises(ConfigError, match="fused needs a GPU; tests set TRITON_INTERPRET=1"):
        backend(CPU)
    monkeypatch.setenv(INTERPRET, "1")
    assert backend(CPU) == "fused"


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        ("bogus", "float32", "^GAMMARAY_KERNELS is 'bogus', use one of: auto, fused, torch$"),
        ("fused", "bfloat16", "^Triton's interpreter computes bfloat16 wrongly: set dtype: float32$"),
    ],
)
def test_a_model_is_not_even_loaded(
    value: str, dtype: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    monkeypatch.setenv(INTERPRET, "1")
    with pytest.raises(ConfigError, match=message):
        load_runner(tiny_llama(), dtype=dtype)


def test_without_triton_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"need Triton: pip install .*, or set GAMMARAY_KERNELS=torch"):
        backend(CUDA)
    assert backend(CPU) == "torch"
