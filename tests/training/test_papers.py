"""What a drafter's papers must say before it may answer requests."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support import papers as made
from support.checkpoint import save_checkpoint

from gammaray import papers
from gammaray.actors.admission import admit
from gammaray.drafter_names import alone
from gammaray.engine.build import build_engine
from gammaray.engine.validate import validate
from gammaray.errors import ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("model"), layers=3)


@pytest.fixture
def drafter(tmp_path: Path, model: str) -> Path:
    folder = made.head(tmp_path / "out", model)
    made.write(folder)
    return folder


def edit(file: Path, **changed: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def spoil(folder: Path) -> None:
    """One weight is another number."""
    file = folder / papers.WEIGHTS
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_papers_in_order_refuse_nothing(drafter: Path) -> None:
    found = papers.read(drafter)
    assert found is not None and found.report == made.report(drafter)
    assert papers.refusal("x", found, found.target, str(drafter), "tiny") == ""


def test_a_drafter_from_elsewhere_needs_none(tmp_path: Path) -> None:
    (tmp_path / papers.CONFIG).write_text("{}")
    assert papers.read(tmp_path) is None and papers.read(tmp_path / "none") is None
    assert papers.refusal("x", None, "0" * 64, "x", "tiny") == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda folder: (folder / papers.REPORT).unlink(), "no acceptance report"),
        (lambda folder: made.write(folder, drafter_sha256="0" * 64), "is not what its report.json is of"),
        (spoil, "model.safetensors or config.json is not what"),
        (lambda folder: edit(folder / papers.CONFIG, rope_theta=1.0), "config.json is not what"),
        (lambda folder: shutil.copy(folder / papers.WEIGHTS, folder / "more.safetensors"), "is not what"),
        (lambda folder: edit(folder / papers.REPORT, speedup_predicted=math.inf), "speedup_predicted: "),
        (lambda folder: made.write(folder, target_sha256="0" * 64), "of another target"),
        (lambda folder: edit(folder / papers.REPORT, gamma=0), "gamma: "),
        (lambda folder: edit(folder / papers.REPORT, workloads=[]), "workloads: "),
        (lambda folder: edit(folder / papers.REPORT, target_sha256="abc"), "target_sha256: "),
        (lambda folder: (folder / papers.REPORT).write_text("{"), "cannot be used"),
        (lambda folder: edit(folder / papers.REPORT, tau=3.0), "unknown key"),
    ],
)
def test_a_report_that_does_not_count_refuses(
    drafter: Path, change: Callable[[Path], object], why: str
) -> None:
    """Else a head could answer with the report of another, or after it was trained on."""
    change(drafter)
    found = papers.read(drafter)
    assert found is not None and found.report is None
    reason = papers.refusal("drafter head", found, found.target, "there", "tiny")
    assert why in reason and "`gammaray train report tiny --drafter there`" in reason


def test_a_spread_that_falls_is_no_spread() -> None:
    with pytest.raises(ValueError, match="must ascend"):
        papers.Spread(requests=3, p5=0.6, p50=0.5, p95=0.7)


def test_a_server_takes_a_drafter_with_a_report_and_none_without(model: str, drafter: Path) -> None:
    config = alone({"model": model}, "float32", {"head": {"method": "eagle3", "path": str(drafter)}})
    admit(config)
    (drafter / papers.REPORT).unlink()
    with pytest.raises(ConfigError, match=r"^drafter head \(version 1\): it has no acceptance report"):
        admit(config)
    build_engine(config)  # to measure it, there must be a way
    checks = {check.name: check for check in validate(config)}
    assert not checks["drafter head"].ok and "no acceptance report" in checks["drafter head"].detail


def test_another_target_s_head_is_neither_admitted_nor_loaded(
    tmp_path: Path, model: str, drafter: Path
) -> None:
    """As after a fine-tune: same name, same shapes, other weights."""
    other = save_checkpoint(tmp_path / "tuned", seed=1, layers=3)
    config = alone({"model": other}, "float32", {"head": {"method": "eagle3", "path": str(drafter)}})
    for refuses in (admit, build_engine):
        with pytest.raises(ConfigError, match=f"gammaray train refresh {other} --drafter {drafter}"):
            refuses(config)
