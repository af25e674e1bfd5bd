"""`gammaray train eagle` from a checkpoint on disk to a drafter that the engine loads."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.checkpoint import save_checkpoint
from typer.testing import CliRunner

from gammaray import cli, papers
from gammaray.engine import identity
from gammaray.errors import ConfigError
from gammaray.training.loop import Trainer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("target"), layers=6)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    place.write_text("\n".join(json.dumps({"body": {"prompt": f"{i} and {i}"}}) for i in range(24)))
    return place


def train(target: str, prompts: Path, run: Path, *more: str, steps: int = 12) -> tuple[int, str, str]:
    given = [*("--run", str(run)), *("--prompts", str(prompts)), *("--epochs", str(steps / 6))]
    sizes = ["--tokens", "2000", "--temperatures", "0,1", "--pass-tokens", "512", "--draft-vocab", "200"]
    return call(
        "train", "eagle", target, *given, *sizes, "--dtype", "float32", "--no-report", "--json", *more
    )


def call(*given: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, given)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_a_run_that_is_stopped_goes_on_and_leaves_a_drafter(
    target: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command, stopped in its third step, then not: what comes out is what comes without a stop."""
    steps = Trainer._step

    def interrupted(self: Trainer, *given: Any) -> Any:
        if self.number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return steps(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", interrupted)
        code, out, err = train(target, prompts, tmp_path / "run")
    assert code == 1 and not out and "to go on:" in err
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()] == ["step-000000003.pt"]
    assert not (tmp_path / "run" / "out").exists()
    code, out, _ = train(target, prompts, tmp_path / "run")
    made = json.loads(out)
    assert code == 0 and made["held_out"]["tau"] >= 1 and made["steps"] > 3
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        *("checkpoint", "data", "made.json", "out", "run.json")
    ]
    assert papers.made_for(tmp_path / "run" / "out") == identity.of(target)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run" / "out").iterdir()}
    assert len(set(modes.values())) == 1, "a server of another user reads what the umask lets it"
    drafter = f"eagle3:{tmp_path / 'run' / 'out'}"
    code, out, _ = call(*("generate", "1 and 1", "--model", target, "--drafter", drafter, "--json"))
    assert code == 0 and json.loads(out)["alpha"] is not None
    train(target, prompts, tmp_path / "whole", "--data", str(tmp_path / "run" / "data"))
    weights = [(tmp_path / name / "out" / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]


def test_a_run_does_not_go_on_as_another(target: str, prompts: Path, tmp_path: Path) -> None:
    train(target, prompts, tmp_path, steps=1)
    with pytest.raises(ConfigError, match="depth"):
        train(target, prompts, tmp_path, "--depth", "2", steps=1)
