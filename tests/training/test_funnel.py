"""Which drafter is chosen, and why the others are not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoint import save_checkpoint
from typer.testing import CliRunner

from gammaray import cli
from gammaray.engine.bench.figures import Row
from gammaray.errors import ConfigError
from gammaray.training import funnel
from gammaray.training.choose import Wanted, choose, parameters
from gammaray.training.evaluate import GREEDY
from gammaray.training.funnel import Coarse, Limits, Sharing, Verdict
from gammaray.types import Reuse

LIMITS = Limits()
HEAD = Coarse(size=1 / 25, alpha=0.6, latency=0.2)


def row(name: str, speedup: float | None, low: float | None = None, high: float | None = None) -> Row:
    return Row(name, "all", 8, 8, 100, 50, 80, 80, 0.6, 0.6, 2.0, 20.0, 15.0, speedup, (low, high))


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (HEAD, ""),
        (Coarse(1 / 10, 0.9, 0.1), "10.0% of the target's parameters, more than 5.0%"),
        (Coarse(1 / 25, 0.5, 0.1), "alpha 0.50 is below 0.55"),
        (Coarse(1 / 25, 0.9, 0.31), "31% of a plain one, more than 30%"),
        (Coarse(0.0, 0.2, 0.01, free=True), ""),  # an n-gram table need not be right as often
        (Coarse(0.0, 0.2, 0.2), "alpha 0.20"),  # the target's own layers must
        (Coarse(0.0, None, 0.01, free=True), "nothing that was tested"),
        (Coarse(None, 0.6, 0.1), ""),  # of a size that nobody knows
    ],
)
def test_the_coarse_sieve(found: Coarse, why: str) -> None:
    reason = funnel.coarse(found, LIMITS)
    assert (why in reason) if why else reason == ""


def test_a_small_drafter_is_not_dropped_but_remarked_on() -> None:
    assert funnel.remark(Coarse(1 / 100, 0.6, 0.1), LIMITS) and not funnel.remark(HEAD, LIMITS)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (Sharing(Reuse(100, 90), Reuse(100, 60)), ""),
        (Sharing(Reuse(100, 90), None), ""),
        (Sharing(Reuse(100, 40), None), "the target reuses 40%"),
        (Sharing(Reuse(100, 90), Reuse(100, 10)), "it reuses 10%"),
        (Sharing(Reuse(0, 0), Reuse(0, 0)), ""),
    ],
)
def test_the_sieve_of_reused_kv(found: Sharing, why: str) -> None:
    reason = funnel.sharing(found, LIMITS)
    assert (why in reason) if why else reason == ""


def test_the_fastest_is_chosen_if_its_gain_is_sure() -> None:
    """The point estimate of `lucky` is the best, and its interval holds a loss."""
    rows = {"a": row("a", 1.2, 1.1, 1.3), "b": row("b", 1.4, 1.2, 1.6), "lucky": row("lucky", 1.9, 0.8, 2.9)}
    assert funnel.best(rows) == "b"
    assert funnel.measured("b", rows) == (True, "the fastest: 1.40x (1.20 to 1.60)")
    assert funnel.measured("a", rows) == (False, "1.20x (1.10 to 1.30), behind b with 1.40x")
    assert funnel.measured("lucky", rows) == (False, "no sure gain: 1.90x (0.80 to 2.90)")
    assert funnel.best({"a": row("a", 0.97, 0.9, 0.99), "none": row("none", None)}) is None


def test_the_table_says_that_plain_decoding_stays() -> None:
    said = funnel.as_text([Verdict("a", "coarse", False, "alpha 0.20 is below 0.55", HEAD)])
    assert "out (coarse): alpha 0.20 is below 0.55" in said and said.endswith(funnel.NONE)


def test_candidates_come_as_far_as_they_should(tmp_path: Path) -> None:
    """The target as its own drafter is too large, an exit too often wrong, a missing head does not load."""
    model = save_checkpoint(tmp_path / "model", layers=3)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"question_id": 1, "turns": ["ab ab ab"]}\n{"question_id": 2, "turns": ["who?"]}\n')
    names = ["recycle", "layer_exit:2", f"eagle3:{tmp_path / 'none'}", model]
    asked = [
        model,
        "--candidates",
        ",".join(names),
        "--held-out",
        prompts,
        "--max-tokens",
        24,
        "--max-latency",
        9,
        "--json",
    ]
    done = CliRunner().invoke(cli.app, ["train", "choose", *map(str, asked)])
    told = json.loads(done.stdout)
    found = {one["drafter"]: one for one in told["verdicts"]}
    assert [found[name]["sieve"] for name in names] == ["measured", "coarse", "load", "coarse"]
    assert found[model]["coarse"]["size"] == 1.0 and found["layer_exit:2"]["coarse"]["size"] == 0.0
    shared = found["recycle"]["sharing"]
    assert shared["own"] is None and shared["target"]["reused"] >= 0.5 * shared["target"]["seen"] > 0
    assert found["recycle"]["measured"]["equal"] == 2
    assert done.exit_code == (0 if told["chosen"] else 1)


def test_parameters_are_numbers_that_were_learned(tmp_path: Path) -> None:
    """Not the ids of a draft vocabulary, which are as many as it has tokens."""
    import torch
    from safetensors.torch import save_file

    ids = torch.zeros(1000, dtype=torch.int64)
    save_file(
        {"w": torch.zeros(3, 4, dtype=torch.bfloat16), "b": torch.zeros(5), "d2t": ids},
        tmp_path / "a.safetensors",
    )
    assert parameters(tmp_path) == 17
    assert parameters(tmp_path / "none") is None


def test_a_size_of_nothing_leaves_what_only_looks_things_up() -> None:
    assert "more than 0.0%" in funnel.coarse(HEAD, funnel.Limits(largest=0))
    assert funnel.coarse(Coarse(0.0, 0.2, 0.01, free=True), funnel.Limits(largest=0)) == ""


def test_answers_of_one_token_are_no_answers_to_time_by(tmp_path: Path) -> None:
    wanted = Wanted(save_checkpoint(tmp_path), "ngram", sampling=replace(GREEDY, max_tokens=1))
    with pytest.raises(ConfigError, match="allow more tokens"):
        choose(wanted)
