"""Speculative = plain, token for token, with the fused kernels under the engine: trees and moved nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.decoding import run
from support.tape import Letters
from tiny import tiny_llama
from torch import Tensor

from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.loading import load_runner
from gammaray.kernels.backend import VARIABLE
from gammaray.kernels.fused import launch
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan


def test_speculative_decoding_gives_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wrong mask of a tree, and accepted nodes that do not move: with drafts of the target's
    own weights every round accepts some. In float32, where texts are equal to the token."""
    trees: list[int] = []  # nodes of each call that verifies
    real = launch.paged_tree_attention

    def watched(*args: Any, **options: Any) -> Tensor:
        trees.append(int((args[3].ancestors != 0).sum()))
        return real(*args, **options)

    monkeypatch.setenv(VARIABLE, "fused")
    shape = {"num_blocks": 16, "block_size": 4, "max_model_len": 32}
    target, drafter = (load_runner(tiny_llama(12, layers=2), "float32", **shape) for _ in range(2))
    monkeypatch.setattr(launch, "paged_tree_attention", watched)
    request = GenerateRequest(
        "r", (1, 2, 3, 4, 5), SamplingParams(temperature=0.0, max_tokens=8), SpeculationPlan("own", 2, 2)
    )
    found = []
    for one in (request, replace(request, plan=PLAIN)):
        engine = Engine(target, Letters(), drafters={"own": ModelDrafter(drafter)}, options=EngineOptions())
        found += run(engine, [one]).values()
    speculative, plain = found
    assert speculative.ids == plain.ids and len(plain.ids) == 8
    assert speculative.stats is not None and speculative.stats.rounds < 8
    assert max(trees) >= 4  # two levels of two nodes
