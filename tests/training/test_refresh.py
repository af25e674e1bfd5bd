"""A drafter is made anew when its target changed, the way it was made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import papers as made
from support.checkpoint import save_checkpoint
from typer.testing import CliRunner

from gammaray import cli, papers
from gammaray.engine import identity
from gammaray.errors import ConfigError
from gammaray.training import block_command, command, eagle3_command, refresh
from gammaray.training.block_command import Block, Medusa
from gammaray.training.command import Asked, Kind
from gammaray.training.dspark import Sizes
from gammaray.training.kinds import KINDS

SIZES = eagle3_command.Sizes(layers=(1, 2, 3), depth=3, draft_vocab=99)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("model"), layers=3)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("tuned"), seed=1, layers=3)


@pytest.fixture
def drafter(tmp_path: Path, model: str) -> Path:
    """As a run leaves it: run.json has what it was asked for, made.json what came of it."""
    run = tmp_path / "run"
    folder = made.head(run / "out", model)
    kind = eagle3_command.kind(asked := begun(model, run), SIZES)
    noted = {"method": kind.method, "target_sha256": identity.of(model), **asked.settings, **kind.settings}
    (run / "run.json").write_text(json.dumps(noted))
    (run / "made.json").write_text(json.dumps({"tokens": 999, "seed": 999}))
    made.write(folder)
    return folder


def begun(model: str, run: Path, **more: Any) -> Asked:
    return Asked(model, run, tokens=1234, temperatures=(0.0, 0.5), epochs=2.0, seed=7, passes=2, **more)


def test_the_same_target_needs_nothing_but_a_report(model: str, drafter: Path) -> None:
    assert refresh.plan(model, drafter).state == "fresh"
    (drafter / papers.REPORT).unlink()
    assert refresh.plan(model, drafter).state == "unreported"


def test_a_changed_target_has_a_run_of_its_own_where_it_goes_on(tuned: str, drafter: Path) -> None:
    """The old run must not be overwritten: its drafter may still answer."""
    todo = refresh.plan(tuned, drafter)
    assert (todo.state, todo.drafter) == ("stale", todo.run / "out")
    assert (
        todo.run
        == drafter.parent.with_name(f"run-{identity.of(tuned)[:12]}")
        == refresh.plan(tuned, drafter).run
    )


def test_it_is_trained_as_it_was(tuned: str, drafter: Path, tmp_path: Path) -> None:
    """What came of the first run (made.json) is not what was asked for."""
    asked, kind = refresh.again(tuned, drafter, tmp_path / "new")
    assert asked == begun(tuned, tmp_path / "new")
    assert (kind.method, kind.settings) == ("eagle3", eagle3_command.kind(asked, SIZES).settings)


@pytest.mark.parametrize(
    "make",
    [
        lambda asked: eagle3_command.kind(asked, SIZES),
        lambda asked: block_command.medusa(Medusa(heads=2, layers=3)),
        lambda asked: block_command.block(asked, Block((1, 2), 77, sizes=Sizes(block=3, rank=8))),
    ],
)
def test_every_head_is_made_anew_with_its_own_settings(model: str, make: Callable[[Asked], Kind]) -> None:
    """JSON has lists for tuples; a setting that is lost would be the default again."""
    asked = begun(model, Path("run"))
    kind = make(asked)
    noted = json.loads(json.dumps({"method": kind.method, **asked.settings, **kind.settings}))
    assert KINDS[kind.method](asked, noted).settings == kind.settings


def test_it_is_trained_as_it_was_where_only_the_drafter_was_kept(
    tuned: str, drafter: Path, tmp_path: Path
) -> None:
    """As of a head that comes with a package: run.json lies beside its weights, `made` in it."""
    noted = json.loads((drafter.parent / "run.json").read_text()) | {"made": {"tokens": 999}}
    (drafter / "run.json").write_text(json.dumps(noted))
    (drafter.parent / "run.json").unlink()
    assert refresh.plan(tuned, drafter).run == Path.cwd() / f"out-{identity.of(tuned)[:12]}"
    assert refresh.again(tuned, drafter, tmp_path / "new")[0] == begun(tuned, tmp_path / "new")


def test_prompts_of_a_file_must_be_given_again(tuned: str, drafter: Path, tmp_path: Path) -> None:
    """Else the new head would silently learn from other texts."""
    about = drafter.parent / "data" / "corpus" / "about.json"
    about.parent.mkdir(parents=True)
    about.write_text(json.dumps({"questions": "sha256 abc"}))
    with pytest.raises(ConfigError, match="give it with --prompts"):
        refresh.again(tuned, drafter, tmp_path / "new")
    file = tmp_path / "prompts.jsonl"
    assert refresh.again(tuned, drafter, tmp_path / "new", file)[0].prompts == file


def test_nobody_knows_how_a_head_from_elsewhere_was_made(tuned: str, drafter: Path) -> None:
    (drafter.parent / "run.json").unlink()
    with pytest.raises(ConfigError, match="train one"):
        refresh.again(tuned, drafter, drafter)
    (drafter / papers.CONFIG).write_text("{}")
    with pytest.raises(ConfigError, match="did not make it"):
        refresh.plan(tuned, drafter)


def test_the_command_trains_reports_and_says_where(
    tuned: str, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training itself is tested elsewhere; here its place is taken by a head that lies there at the end."""
    trained = []

    def train(asked: Asked, kind: Kind, as_json: bool, again: str) -> int:
        trained.append((asked.target, asked.run, kind.method))
        made.head(asked.run / "out", asked.target)
        return 0

    monkeypatch.setattr(command, "train", train)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"question_id": 1, "turns": ["ab ab ab"]}\n{"question_id": 2, "turns": ["who?"]}\n')
    asked = [tuned, "--drafter", drafter, "--run", tmp_path / "new", "--held-out", prompts]
    done = CliRunner().invoke(cli.app, ["train", "refresh", *map(str, asked)])
    assert done.exit_code == 0, done.output
    assert trained == [(tuned, tmp_path / "new", "eagle3")]
    found = papers.read(tmp_path / "new" / "out")
    assert found is not None and found.report is not None and found.target == identity.of(tuned)
    assert str(tmp_path / "new" / "out") in done.stdout
    assert (
        CliRunner()
        .invoke(cli.app, ["train", "refresh", *map(str, asked[:2]), str(tmp_path / "new" / "out")])
        .exit_code
        == 0
    )
    assert len(trained) == 1, "a fresh one is not trained again"
