"""The acceptance report: what it says is what was measured, and the card says the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import papers as made
from support.checkpoint import save_checkpoint
from typer.testing import CliRunner

from gammaray import cli, papers
from gammaray.errors import ConfigError
from gammaray.training import evaluate, report
from gammaray.types import SpeculationStats

QUESTIONS = [("copy", "ab ab ab ab"), ("copy", "say xyxy"), ("chat", "who?")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("model"), layers=3)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "questions.jsonl"
    entries = [{"question_id": i, "category": c, "turns": [t]} for i, (c, t) in enumerate(QUESTIONS)]
    file.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return file


def test_a_report_is_written_and_counts(model: str, prompts: Path, tmp_path: Path) -> None:
    """From the command line to papers that a server takes."""
    run, out = tmp_path / "run", tmp_path / "run" / "out"
    made.head(out, model)
    (run / "run.json").write_text(json.dumps({"method": "eagle3", "tokens": 300, "seed": 5}))
    (run / "made.json").write_text(json.dumps({"tokens": 321, "hours": 0.5}))
    asked = [model, "--drafter", out, "--held-out", prompts, "--max-tokens", 24, "--gamma", 2, "--json"]
    done = CliRunner().invoke(cli.app, ["train", "report", *map(str, asked)])
    assert done.exit_code == 0, done.output
    found = papers.read(out)
    assert found is not None and found.report is not None and found.problem == ""
    one = found.report
    assert json.loads(done.stdout) == one.model_dump(mode="json")
    assert [(part.name, part.prompts) for part in one.workloads] == [("copy", 2), ("chat", 1)]
    assert one.total.rounds == sum(part.rounds for part in one.workloads)
    assert (one.data, one.gamma, one.equal, one.kl is not None and one.kl < 1e-6) == (
        prompts.name,
        2,
        True,
        True,
    )
    drafts = one.speedup_predicted and report.expected_tau(one.survival, one.drafting) / one.speedup_predicted
    assert one.verify_ratio < drafts <= one.verify_ratio + one.gamma * one.latency_ratio + 1e-9
    card = (out / papers.CARD).read_text()
    for said in (
        one.target_sha256,
        one.drafter_sha256,
        "| copy | 2 |",
        "tokens: 300",
        "tokens: 321",
        "seed: 5",
    ):
        assert said in card, said
    assert report.facts(out) == {
        "method": "eagle3",
        "tokens": 300,
        "seed": 5,
        "made": {"tokens": 321, "hours": 0.5},
    }


def test_no_report_is_made_of_another_target_s_drafter(tmp_path: Path, model: str) -> None:
    out = made.head(tmp_path / "out", model)
    other = save_checkpoint(tmp_path / "other", seed=1, layers=3)
    with pytest.raises(ConfigError, match=f"train refresh {other}"):
        report.report(evaluate.Wanted(other, report.entry(out)), out)
    assert not (out / papers.REPORT).exists()


def test_tau_follows_from_survival_and_from_the_rounds_that_drafted() -> None:
    """math.md section 2: 1 + 0.8 + 0.8 * 0.5; half of that gain when every other round drafts."""
    assert report.expected_tau([0.8, 0.5]) == pytest.approx(2.2)
    assert report.expected_tau([0.8, 0.5], 0.5) == pytest.approx(1.6)
    assert report.survivals(SpeculationStats(level_tested=(4, 2, 0), level_accepted=(3, 1, 0))) == [0.75, 0.5]


def test_alpha_spreads_over_requests_with_enough_tested_tokens() -> None:
    """A request with 31 of them says nothing: three answers in a row would be an alpha of 1."""
    stats = [SpeculationStats(tested=100, first_accepted=10 * i) for i in range(11)]
    found = report.spread([*stats, *[SpeculationStats(tested=31, first_accepted=31)] * 40])
    assert found is not None and found.requests == 11
    assert (found.p5, found.p50, found.p95) == pytest.approx((0.05, 0.5, 0.95))
    assert report.spread(stats[:0]) is None


def test_prompts_that_it_learned_from_judge_nothing(model: str, prompts: Path, tmp_path: Path) -> None:
    out = made.head(tmp_path / "out", model)
    (out / "run.json").write_text(json.dumps({"questions": f"sha256 {papers.sha256(prompts)}"}))
    with pytest.raises(ConfigError, match="the very prompts"):
        report.report(evaluate.Wanted(model, report.entry(out), prompts), out)
