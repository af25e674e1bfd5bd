"""`gammaray bench engine` on a checkpoint from disk, and how drafters are named on a command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from support.checkpoint import save_checkpoint
from typer.testing import CliRunner

from gammaray import cli
from gammaray.drafter_names import arms, entries
from gammaray.engine.engine import Engine, StepOutput
from gammaray.errors import ConfigError

ROW = {"drafter", "category", "prompts", "alpha", "tau", "tok_s", "plain_tok_s", "speedup", "speedup_ci"}
QUESTIONS = [("copy", "ab ab ab ab"), ("copy", "say xyxy"), ("chat", "who?"), ("chat", "why?")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "questions.jsonl"
    entries = [{"question_id": i, "category": c, "turns": [t]} for i, (c, t) in enumerate(QUESTIONS)]
    file.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return file


def bench(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["bench", "engine", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_rows_agree_with_themselves_and_with_each_other(model: str, questions: Path, tmp_path: Path) -> None:
    names = ["ngram", "ngram@2x3", model]
    arguments = ["--model", model, "--dataset", questions, "--drafters", ",".join(names), "--max-tokens", 12]
    code, out, err = bench(
        *arguments, "--no-adaptive", "--gamma", 4, "--json", "--out", tmp_path / "new" / "results"
    )
    report = json.loads(out)
    assert (code, report["concurrency"], report["dtype"], report["interrupted"]) == (0, 1, "float32", False)
    assert {"machine", "versions", "rows"} <= set(report)
    assert report["shapes"] == {"ngram": "4 x 1", "ngram@2x3": "2 x 3", model: "4 x 1"}
    rows = {(row["drafter"], row["category"]): row for row in report["rows"]}
    assert set(rows) == {(name, category) for name in names for category in ("all", "copy", "chat")}
    for row in rows.values():
        assert set(row) >= ROW
        assert row["equal"] == row["prompts"]  # what a drafter may never change
        assert row["speedup"] == pytest.approx(row["tok_s"] / row["plain_tok_s"])
        assert (
            row["tau"] == (row["tokens"] - row["prompts"]) / row["rounds"]
        )  # a prompt's pass gives the first
    for name in names:
        parts = [rows[name, category] for category in ("copy", "chat")]
        for count in ("prompts", "tokens", "rounds"):
            assert rows[name, "all"][count] == sum(part[count] for part in parts)
        assert rows[name, "all"]["plain_tok_s"] == rows["ngram", "all"]["plain_tok_s"]  # measured once
    assert (rows[model, "all"]["alpha"], rows[model, "all"]["tau"] > 3) == (1.0, True)  # it drafts for itself
    assert [line.split()[0] for line in err.splitlines() if "tok/s" in line] == ["1/4", "2/4", "3/4", "4/4"]
    written = tmp_path / "new" / "results"
    assert json.loads((written / "engine.json").read_text()) == report
    assert f"| {model} | copy | 2 | 1.00 | 1.00 |" in (written / "engine.md").read_text()


def test_what_was_measured_before_an_interrupt_is_kept(
    model: str, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the third prompt, whose plain run would otherwise count without its partner."""
    step, ended = Engine.step, []

    def interrupted(engine: Engine) -> StepOutput:
        if len(ended) == 2 + 2 * 2 + 1:  # warm-up, two prompts, and half of one
            raise KeyboardInterrupt
        done = step(engine)
        ended.extend(chunk.request_id for chunk in done.chunks if chunk.finish)
        return done

    monkeypatch.setattr(Engine, "step", interrupted)
    arguments = ["--model", model, "--dataset", questions, "--drafters", "ngram", "--max-tokens", 6]
    code, out, _ = bench(*arguments, "--out", tmp_path)
    report = json.loads((tmp_path / "engine.json").read_text())
    assert (code, report["interrupted"], report["rows"][0]["prompts"]) == (1, True, 2)
    assert out.splitlines()[-1] == "2 prompts, then interrupted"


def test_a_prompt_that_does_not_fit_is_left_out_with_its_reason(model: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    long, short = ({"custom_id": n, "body": {"prompt": n * size}} for n, size in (("a", 300), ("b", 3)))
    file.write_text(f"{json.dumps(long)}\n{json.dumps(short)}\n")
    arguments = ["--model", model, "--drafters", "ngram", "--max-tokens", 4, "--json", "--dataset", file]
    code, out, _ = bench(*arguments)
    report = json.loads(out)
    assert (code, report["rows"][0]["prompts"], report["skipped"][0]["prompt"]) == (0, 1, "a")
    file.write_text(json.dumps(long))
    with pytest.raises(ConfigError, match="no prompt could be measured"):
        bench(*arguments)


def test_drafters_come_from_a_configuration_or_a_file(model: str, questions: Path, tmp_path: Path) -> None:
    """Only those that were asked for are loaded: the other one here cannot be."""
    lookup = {"method": "ngram", "min_ngram": 1}
    file = tmp_path / "config.yaml"
    broken = {"method": "model", "model": "./none"}
    file.write_text(
        yaml.safe_dump({"target": {"model": model}, "drafters": {"lookup": lookup, "broken": broken}})
    )
    few = ["--dataset", questions, "--limit", 1, "--max-tokens", 2, "--json"]
    report = json.loads(bench("--config", file, "--drafters", "lookup,ngram", *few)[1])
    assert {row["drafter"] for row in report["rows"]} == {"lookup", "ngram"}
    (tmp_path / "drafters.yaml").write_text(yaml.safe_dump({"drafters": {"mine": lookup}}))
    report = json.loads(bench("--model", model, "--drafters", tmp_path / "drafters.yaml", *few)[1])
    assert {row["drafter"] for row in report["rows"]} == {"mine"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dataset", "none.jsonl"], "cannot read data set 'none.jsonl': No such file"),
        (["--config", "none.yaml"], "cannot read configuration"),
        (["--drafters", "none.yaml"], "cannot read drafters"),
        (["--drafters", ", "], "--drafters names none"),
        (["--drafters", "ngram,ngram"], "each only once"),
        (["--drafters", "ngram@9x8"], "9 x 8 is no shape"),
        (["--gamma", "16", "--width", "5", "--drafters", "ngram"], "16 x 5 is no shape"),
        (["--drafters", "sufix"], "no drafter is called 'sufix'; did you mean 'suffix'?"),
        (["--drafters", "ngram", "--dtype", "int4"], "target.dtype: Input should be"),
        (["--drafters", "ngram", "--out", __file__], "--out"),
    ],
)
def test_bad_input_is_told_before_anything_is_loaded(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as fault:
        bench("--model", "./never-loaded", *arguments)
    assert says in str(fault.value)


def test_names_mean_entries_of_a_configuration() -> None:
    assert entries("suffix", "float32") == {"suffix": {"method": "suffix"}}
    assert entries("layer_exit:4", "float32") == {"layer_exit:4": {"method": "layer_exit", "layers": 4}}
    assert entries("eagle3:a/b", "auto") == {"eagle3:a/b": {"method": "eagle3", "path": "a/b"}}
    assert entries("mtp", "auto") == {"mtp": {"method": "mtp"}}
    assert entries("a+b", "float16")["a+b"] == {"method": "model", "model": "a+b", "dtype": "float16"}
    both = entries("ngram+layer_exit:2", "auto")
    assert list(both) == ["ngram", "layer_exit:2", "ngram+layer_exit:2"]
    assert both["ngram+layer_exit:2"] == {"method": "composite", "drafters": ["ngram", "layer_exit:2"]}
    assert [(arm.drafter, arm.gamma, arm.width) for arm in arms("m@ain/x@4x2, ngram", 8, 1)] == [
        ("m@ain/x", 4, 2),
        ("ngram", 8, 1),
    ]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("eagle3", "write eagle3:FOLDER"),
        ("layer_exit", "write layer_exit:8"),
        ("layer_exit:two", "write layer_exit:8"),
        ("ngram:4", "ngram takes no value"),
        ("composite", "as in ngram+recycle"),
        ("mtp:", "write mtp:FOLDER"),
    ],
)
def test_names_that_lack_something_say_what(name: str, says: str) -> None:
    with pytest.raises(ConfigError) as fault:
        entries(name, "auto")
    assert says in str(fault.value)
