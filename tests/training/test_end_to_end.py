"""A head from its training to its requests, and what happens to it when its target changes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from support.checkpoint import save_checkpoint
from typer.testing import CliRunner

from gammaray import cli, papers
from gammaray.actors.admission import admit
from gammaray.config import Config
from gammaray.drafter_names import alone
from gammaray.engine import identity
from gammaray.errors import ConfigError

SIZES = ["--tokens", "800", "--epochs", "1", "--pass-tokens", "512", "--draft-vocab", "200", "--depth", "2"]


def call(*given: str) -> list[str]:
    done = CliRunner().invoke(cli.app, given)
    assert done.exit_code == 0, (given, done.output, done.exception)
    return done.stdout.splitlines()


def test_a_trained_head_is_admitted_and_one_of_another_target_is_made_anew(tmp_path: Path) -> None:
    """`train eagle`, its report, a server's admission, other weights in place of the target's, the command
    that the refusal names, and the admission of what that made."""
    target, run = save_checkpoint(tmp_path / "target", layers=6), tmp_path / "run"
    prompts, held = tmp_path / "p.jsonl", tmp_path / "h.jsonl"
    prompts.write_text("\n".join(json.dumps({"body": {"prompt": f"{i} and {i}"}}) for i in range(24)))
    held.write_text('{"question_id": 1, "turns": ["ab ab ab"]}\n{"question_id": 2, "turns": ["7 and 7"]}\n')
    files = ["--prompts", str(prompts), "--held-out", str(held)]
    told = call("train", "eagle", target, "--run", str(run), *files, *SIZES, "--json")
    made = json.loads(told[-1])
    assert made["target_sha256"] == identity.of(target) and made["equal"]
    admit(configured(target, run / "out"))

    save_checkpoint(tmp_path / "target", seed=1, layers=6)
    with pytest.raises(ConfigError) as refused:
        admit(configured(target, run / "out"))
    command = shlex.split(refused.value.message.split("`")[1])
    call(*command[1:], *files)
    (new,) = tmp_path.glob("run-*")
    found = papers.read(new / "out")
    assert found is not None and found.report is not None and found.target == identity.of(target)
    admit(configured(target, new / "out"))
    assert papers.made_for(run / "out") == made["target_sha256"], "the old one stays as it is"


def configured(target: str, drafter: Path) -> Config:
    return alone({"model": target}, "float32", {"head": {"method": "eagle3", "path": str(drafter)}})
