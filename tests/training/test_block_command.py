"""`train dspark`, `train confidence` and `train medusa`, from a target to a drafter that the engine loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoint import save_checkpoint

from gammaray import drafter_config
from gammaray.engine import identity
from gammaray.engine.drafters import registry
from gammaray.engine.drafters.head_loading import read_tensors
from gammaray.engine.loading import load_runner
from gammaray.errors import ConfigError
from gammaray.training import block_command, command
from gammaray.training.block_command import Block, Medusa
from gammaray.training.dspark import Sizes
from gammaray.training.kinds import KINDS

SIZES = Sizes(block=3, depth=1, rank=4)


@pytest.fixture
def asked(tmp_path: Path) -> command.Asked:
    target = save_checkpoint(tmp_path / "target", layers=4)
    lines = [json.dumps({"body": {"prompt": f"{i} times {i} is"}}) for i in range(24)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return command.Asked(
        str(target),
        tmp_path / "run",
        prompts=tmp_path / "prompts.jsonl",
        tokens=600,
        epochs=1,
        dtype="float32",
    )


def test_drafters_of_every_kind_are_made_and_loaded(
    asked: command.Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second and third learn from the data of the first."""
    assert command.train(asked, block_command.block(asked, Block((1, 3), 64, sizes=SIZES)), True, "") == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"overlap_1", "agreed_3", "tau", "ece_before", "ece_after"} <= made["held_out"].keys()
    first = tmp_path / "run" / "out"
    config = json.loads((first / "config.json").read_text())
    assert config["gammaray_target"] == identity.of(asked.target)
    told = json.loads((first / "calibration.json").read_text())
    assert config["confidence_temperatures"] == pytest.approx(told["temperatures"])

    again = block_command.confidence(str(first))
    assert command.train(other(asked, tmp_path / "again"), again, True, "") == 0
    changed = {
        name
        for name, x in read_tensors(tmp_path / "again" / "out").items()
        if not x.equal(read_tensors(first)[name])
    }
    assert changed == {"confidence_head.proj.weight", "confidence_head.proj.bias"}

    assert command.train(other(asked, tmp_path / "heads"), block_command.medusa(Medusa(2)), True, "") == 0
    runner = load_runner(asked.target, "float32", num_blocks=32)
    entries = [
        drafter_config.DsparkDrafter(method="dspark", path=str(tmp_path / "run" / "out")),
        drafter_config.DsparkDrafter(method="dspark", path=str(tmp_path / "again" / "out")),
        drafter_config.MedusaDrafter(method="medusa", path=str(tmp_path / "heads" / "out")),
    ]
    for entry in entries:
        registry.make(registry.Making("d", entry, runner, asked.target, None))  # type: ignore[arg-type]


def test_each_can_be_made_anew_from_what_its_run_noted(asked: command.Asked) -> None:
    """A setting that is lost on the way makes another drafter of the same name."""
    wanted = [
        block_command.block(asked, Block((1, 3), 64, 7, Sizes(block=3, depth=1, rank=4, markov="rnn"))),
        block_command.medusa(Medusa(2, 3, True)),
    ]
    for kind in wanted:
        noted = json.loads(json.dumps({"method": kind.method, **asked.settings, **kind.settings}))
        assert KINDS[kind.method](asked, noted).settings == kind.settings


def test_what_no_engine_would_load_is_refused_before_anything_is_written(asked: command.Asked) -> None:
    """Not after hours of training."""
    with pytest.raises(ConfigError, match="Markov head 'markov'"):
        Sizes(markov="markov")
    for wanted, said in ((Block(layers=(5,)), "0 to 4"), (Block(mask=9999), "tokens are 0 to")):
        with pytest.raises(ConfigError, match=said):
            command.train(other(asked, asked.run / said[:1]), block_command.block(asked, wanted), True, "")
        assert not asked.place.exists()


def other(asked: command.Asked, run: Path) -> command.Asked:
    return replace(asked, run=run, data=asked.place)
