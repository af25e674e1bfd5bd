"""The search over exits predicts what drafting would do, and picks by it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from matplotlib.image import imread
from support.checkpoint import save_checkpoint
from typer.testing import CliRunner

from gammaray import cli
from gammaray.drafter_names import alone
from gammaray.engine.build import build_engine
from gammaray.engine.local import run
from gammaray.errors import ConfigError
from gammaray.training import layers
from gammaray.training.curve import ALPHA, SPEED
from gammaray.training.layers import Exit, Wanted, search
from gammaray.types import GenerateRequest, SamplingParams, SpeculationPlan

PROMPTS = [tuple(text) for text in (b"ab ab ab", b"who?", b"one two three", b"xyxyxy")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("model"), layers=3)


@pytest.mark.parametrize(("depth", "gamma"), [(1, 3), (2, 1), (2, 4)])
def test_rounds_are_those_of_the_real_drafter(model: str, depth: int, gamma: int) -> None:
    """That no draft is needed to know alpha and tau is the search's whole idea. Answers are shorter than what
    a request's breaker looks at."""
    config = alone({"model": model}, "float32", {"exit": {"method": "layer_exit", "layers": depth}})
    engine = build_engine(config)
    sampling = SamplingParams(temperature=0.0, max_tokens=15, ignore_eos=True)
    plan, part = SpeculationPlan("exit", gamma, 1), engine.runner.first(depth)
    hits = 0
    for prompt in PROMPTS:
        real = run(engine, GenerateRequest("real", prompt, sampling, plan))
        right = layers.hits(part, prompt, real.ids)
        found = layers.rounds(right, gamma)
        assert (len(found), sum(found)) == (real.stats.rounds, real.stats.emitted)
        hits += sum(right)
    assert 0 < hits < 14 * len(PROMPTS)


def test_depth_is_the_one_that_pays() -> None:
    """Free drafts that are always right pay at any depth; dear ones that are right half the time do not."""

    def cheap(tokens: int) -> float:
        return 1.0

    best = layers.best_depth(4, [[True] * 72], 0.0, cheap)
    assert (best.gamma, best.alpha, best.speedup) == (layers.DEEPEST, 1.0, pytest.approx(9.0))
    half = layers.best_depth(4, [[True, False] * 32], 0.4, cheap)
    assert (half.gamma, half.alpha, half.tau) == (1, 0.5, 2.0)
    assert half.speedup == pytest.approx(2 / 1.4)


def test_a_slow_spell_slows_no_exit_beside_the_others() -> None:
    """On a busy machine the exits that were timed last looked slower than the whole target."""
    now, calls = 0.0, 0

    def spend(seconds: float) -> None:
        nonlocal now, calls
        calls += 1
        now += seconds * (20 if calls <= 7 else 1)  # slow until half of the third round is over

    found = layers.in_turns([partial(spend, 1.0), partial(spend, 2.0), partial(spend, 4.0)], lambda: now)
    assert found == [1.0, 2.0, 4.0]


def test_the_earliest_exit_near_the_peak_is_taken() -> None:
    exits = [Exit(n, 0.5, 0.2, 2, 1.5, speed) for n, speed in ((2, 1.10), (4, 1.29), (6, 1.31), (8, 1.30))]
    assert layers.pick(exits).layers == 4
    assert layers.pick(exits, near=0.0).layers == 6
    assert layers.pick(exits[:1]).layers == 2


def test_the_command_writes_what_it_says(model: str, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"question_id": 1, "turns": ["ab ab"]}\n{"question_id": 2, "turns": ["who?"]}\n')
    asked = [model, "--held-out", prompts, "--max-tokens", 12, "--out", tmp_path / "found", "--json"]
    done = CliRunner().invoke(cli.app, ["train", "layer-search", *map(str, asked)])
    told = json.loads(done.stdout)
    assert [one["layers"] for one in told["exits"]] == [1, 2]
    assert told["picked"] in (1, 2)
    assert done.exit_code == (0 if max(one["speedup"] for one in told["exits"]) > 1 else 1)
    assert json.loads((tmp_path / "found" / "layers.json").read_text()) == told
    picture = (imread(tmp_path / "found" / "layers.png")[..., :3] * 255).round().astype(int)
    for colour in ALPHA, SPEED:
        assert (picture == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(-1).any()


def test_layers_that_are_not_there_are_refused(model: str) -> None:
    done = CliRunner().invoke(cli.app, ["train", "layer-search", model, "--layers", "3", "--limit", "1"])
    assert "layers 3: the target has 3, so use 1 to 2" in str(done.exception)


def test_a_target_of_one_layer_has_no_exit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one layer"):
        search(Wanted(save_checkpoint(tmp_path, layers=1)))
