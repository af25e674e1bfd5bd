"""`gammaray generate` and `gammaray validate` on a checkpoint from disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.checkpoint import save_checkpoint
from typer.testing import CliRunner

from gammaray import cli
from gammaray.engine import local
from gammaray.errors import ConfigError
from gammaray.types import SpeculationStats


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("model"))


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_an_answer_goes_to_stdout_and_the_figures_to_stderr(model: str) -> None:
    code, out, err = call(
        "generate", "ab ab ab", "--model", model, "--max-tokens", "12", "--dtype", "float32"
    )
    assert code == 0
    assert out.strip()
    assert "12 tokens" in err


def test_the_same_seed_gives_the_same_answer(model: str) -> None:
    def answer(seed: int, *more: str) -> object:
        arguments = [
            "--model",
            model,
            "--temperature",
            "1",
            "--seed",
            str(seed),
            "--dtype",
            "float32",
            "--json",
        ]
        return json.loads(call("generate", "ab", *arguments, *more)[1])["text"]

    assert answer(1) == answer(1) == answer(1, "--drafter", "none")
    assert answer(1) != answer(2)


def test_compare_has_the_shape_that_scripts_rely_on(model: str) -> None:
    code, out, _ = call("generate", "ab ab", "--model", model, "--compare", "--json", "--max-tokens", "30")
    report = json.loads(out)
    assert code == 0
    assert set(report) == {"plain", "speculative", "equal", "first_difference", "speedup"}
    assert set(report["plain"]) == {"tokens", "tok_s"}
    assert set(report["speculative"]) == {"tokens", "tok_s", "tau", "alpha", "rounds"}
    assert report["equal"] is True
    assert report["plain"]["tokens"] == report["speculative"]["tokens"]


def test_compare_is_readable(model: str) -> None:
    code, out, _ = call("generate", "ab ab", "--model", model, "--compare", "--max-tokens", "30")
    assert code == 0
    assert "float32: the same tokens" in out


def test_a_difference_in_float32_is_a_finding(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(*arguments: object) -> local.Comparison:
        runs = [local.Run(ids, "text", 0.1, 1.0, SpeculationStats()) for ids in ((1, 2, 3), (1, 5, 3))]
        return local.Comparison(runs[0], runs[1], 2.0, 3.0)

    monkeypatch.setattr(local, "compare", differ)
    code, out, _ = call("generate", "ab", "--model", model, "--compare")
    assert code == 1
    assert "tokens differ from number 1 on" in out


def test_a_small_model_can_draft(model: str) -> None:
    arguments = ["--model", model, "--drafter", model, "--gamma", "3", "--width", "2", "--compare", "--json"]
    report = json.loads(call("generate", "ab", *arguments)[1])
    assert report["equal"] is True
    assert report["speculative"]["alpha"] == 1.0  # it drafts for itself


@pytest.mark.parametrize("drafter", ["suffix", "recycle", "lookahead", "layer_exit:1", "ngram+recycle"])
def test_methods_without_weights_draft_by_their_name(model: str, drafter: str) -> None:
    shape = ["--gamma", "4", "--width", "2"]
    arguments = ["--model", model, "--drafter", drafter, *shape, "--compare", "--json"]
    code, out, _ = call("generate", "ab ab ab ab", *arguments, "--max-tokens", "40")
    report = json.loads(out)
    assert (code, report["equal"]) == (0, True)
    assert report["speculative"]["alpha"] is not None, "it never drafted"


def test_a_model_that_is_not_there_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no-such-model"):
        call("generate", "ab", "--model", "no-such-model")


def test_validate_reports_each_link(model: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"target: {{model: {model}, dtype: float32}}\ndrafters: {{lookup: {{method: ngram}}}}\n")
    code, out, _ = call("validate", str(file), "--json")
    report = json.loads(out)
    assert code == 0
    assert report["ok"] is True
    assert all(set(check) == {"name", "ok", "detail"} for check in report["checks"])
    assert "ok    target" in call("validate", str(file))[1]


def test_validate_fails_with_code_1(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("target: {model: no-such-model}\n")
    code, out, _ = call("validate", str(file))
    assert code == 1
    assert out.startswith("FAIL  target")
