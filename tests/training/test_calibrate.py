"""Temperatures from rounds whose confidences are wrong in a known way, and rounds as the engine has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import block_heads, learning
from support.decoding import run
from support.heads import write
from support.tape import Letters
from tiny import tiny_llama

from gammaray.drafter_config import DsparkDrafter
from gammaray.engine.drafters import registry
from gammaray.engine.drafters.base import Drafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.loading import load_runner
from gammaray.engine.runner import ModelRunner
from gammaray.training.calibrate import Round, Rounds, ece, fit, judge
from gammaray.training.calibration import keep
from gammaray.training.rounds import replay
from gammaray.types import GenerateRequest, SamplingParams, SpeculationPlan

WRONG = (2.0, 0.5, 3.0)  # too sure, not sure enough, too sure


def told(rounds: int, seed: int) -> Rounds:
    """Places are accepted as logits say; a drafter told these logits times `WRONG`. Some drafts are short."""
    draw = torch.Generator().manual_seed(seed)
    logits = 1 + torch.randn(rounds, len(WRONG), generator=draw)  # [N, D]
    right = torch.rand(rounds, len(WRONG), generator=draw) < logits.sigmoid()
    said = (logits * torch.tensor(WRONG)).sigmoid()
    accepted = right.long().cumprod(1).sum(1)
    lengths = torch.randint(1, 9, (rounds,), generator=draw).clamp(max=len(WRONG))
    found = [
        Round(tuple(one[:size]), min(count, size))
        for one, size, count in zip(said.tolist(), lengths.tolist(), accepted.tolist(), strict=True)
    ]
    return Rounds.of(found, len(WRONG))


def test_known_temperatures_are_found_and_hold_on_other_rounds() -> None:
    """Fitting a place to its own acceptance instead of the survival up to it would miss them, as would rounds
    without a token at a place that count for it."""
    judged = judge(told(20000, seed=1), told(20000, seed=2))
    assert judged.temperatures == pytest.approx(WRONG, rel=0.3)
    assert judged.after < 0.4 * judged.before and judged.before > 0.05
    assert all(after < before for before, after in judged.by_place)
    assert (judged.fitted, judged.judged) == (20000, 20000)


def test_confidences_that_are_right_are_left_alone() -> None:
    right = told(6000, seed=3)
    logits = right.logits / torch.tensor(WRONG)
    assert fit(replace(right, logits=logits)) == pytest.approx((1, 1, 1), rel=0.2)


def test_a_place_that_hardly_a_round_got_to_is_left_alone() -> None:
    """Else a few misses set it to the end of the scale."""
    rounds = [Round((0.6, 0.6), 0)] * 200 + [Round((0.6, 0.6), 1)] * 20
    assert fit(Rounds.of(rounds, 2))[0] != 1 and fit(Rounds.of(rounds, 2))[1] == 1


def test_ece_by_hand() -> None:
    """Two bins: 0.9 told twice, one came; 0.1 told once, none came. 2/3 * 0.4 + 1/3 * 0.1."""
    error = ece(torch.tensor([0.9, 0.9, 0.1]), torch.tensor([True, False, False]))
    assert error == pytest.approx(2 / 3 * 0.4 + 1 / 3 * 0.1, abs=1e-6)
    assert ece(torch.tensor([]), torch.tensor([])) == 0.0


def drafter(runner: ModelRunner, path: str) -> Drafter:
    config = DsparkDrafter(method="dspark", path=path)
    return registry.make(registry.Making("d", config, runner, "t", None))  # type: ignore[arg-type]


def test_replayed_rounds_are_those_of_the_engine(tmp_path: Path) -> None:
    """Rounds that begin one token off, or drafts from the states of other tokens, differ."""
    model = tiny_llama(12, layers=4, max_position_embeddings=96)
    runner = load_runner(model, "float32", block_size=4, num_blocks=64)
    path = block_heads.write_dspark(tmp_path, model)
    (tokens,) = learning.written(model, documents=1, length=40)
    rounds = list(replay(drafter(runner, path), runner, tokens, [place >= 2 for place in range(40)], 4))
    plan = SpeculationPlan("d", gamma=4, width=1, adaptive=False)
    request = GenerateRequest("r", tuple(tokens[:2]), SamplingParams(temperature=0.0, max_tokens=38), plan)
    engine = Engine(runner, Letters(), (), {"d": drafter(runner, path)}, EngineOptions(max_batch=1))
    served = run(engine, [request])["r", 0]
    assert served.ids == tokens[2:] and served.stats is not None
    accepted = sum(one.accepted for one in rounds)
    assert (accepted, len(rounds)) == (served.stats.accepted, served.stats.rounds)
    assert accepted > 0 and all(len(one.confidence) == 4 for one in rounds[:-4])


def test_temperatures_that_are_kept_change_what_the_engine_is_told(tmp_path: Path) -> None:
    """And only that: the temperatures of a second fit come on top of the first."""
    model = tiny_llama(12, layers=4, max_position_embeddings=96)
    runner = load_runner(model, "float32", block_size=4, num_blocks=64)
    settings = block_heads.dspark_settings(model)
    path = write(tmp_path, block_heads.dspark(model, settings), settings)
    (tokens,) = learning.written(model, documents=1, length=40)
    answers = [place >= 2 for place in range(40)]
    first = list(replay(drafter(runner, path), runner, tokens, answers, 5))
    judged = judge(Rounds.of(first, 5), Rounds.of(first, 5))
    two = replace(judged, temperatures=(2.0, 2.0, 1.0, 4.0, 1.0))
    keep(tmp_path, two)
    keep(tmp_path, two)
    second = list(replay(drafter(runner, path), runner, tokens, answers, 5))
    assert [one.accepted for one in first] == [one.accepted for one in second]
    scaled = torch.tensor(first[0].confidence).logit() / torch.tensor([4.0, 4.0, 1.0, 16.0, 1.0])
    assert second[0].confidence == pytest.approx(scaled.sigmoid().tolist(), abs=1e-4)
