"""Draft heads that come with gammaray: which one fits, and what their folder must hold."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import gammaray
from gammaray import packaged, papers
from gammaray.errors import ConfigError

ALIAS = "smollm2-135m-instruct"
NAME = f"{packaged.HEADS}/{ALIAS}"
WEIGHTS = b"weights of a head"
WORKLOAD = {"name": "all", "prompts": 2, "rounds": 9, "alpha": 0.5, "tau": 2.0, "speedup": 1.4}
REPORT: dict[str, Any] = {
    **{"method": "eagle3", "target": ALIAS, "data": "held out", "dtype": "float32", "temperature": 0.0},
    **{"seed": 0, "gamma": 4, "width": 1, "max_tokens": 64, "alpha": None, "total": WORKLOAD},
    **{"workloads": [WORKLOAD], "survival": [0.5], "latency_ratio": 0.1, "verify_ratio": 1.0, "kl": 0.0},
    **{"drafting": 1.0, "speedup_predicted": 1.4, "equal": True, "machine": {}},
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder with a head of its own, and the model that it was made for."""
    model, folder = tmp_path / "model.gguf", tmp_path / NAME
    model.write_bytes(b"weights of the target")
    monkeypatch.setattr(packaged, "gguf", lambda alias: model)
    folder.mkdir(parents=True)
    (folder / papers.WEIGHTS).write_bytes(WEIGHTS)
    target = hashlib.sha256(model.read_bytes()).hexdigest()
    (folder / papers.CONFIG).write_text(json.dumps({papers.TARGET: target}))
    report = REPORT | {"target_sha256": target, "drafter_sha256": papers.digest(folder)}
    (folder / papers.REPORT).write_text(json.dumps(report))
    return tmp_path


def test_a_head_fits_the_very_weights_that_it_was_made_for(root: Path) -> None:
    """Another model's head would be served, and after a new release of the model's package every start would
    be refused instead of serving without it."""
    assert packaged.fitting_head(ALIAS, root) == NAME
    (root / "model.gguf").write_bytes(b"another quantisation")
    assert packaged.fitting_head(ALIAS, root) is None


@pytest.mark.parametrize("lost", [papers.WEIGHTS, papers.CONFIG, papers.REPORT])
def test_a_head_without_all_of_its_papers_does_not_fit(root: Path, lost: str) -> None:
    (root / NAME / lost).unlink()
    assert packaged.fitting_head(ALIAS, root) is None


def test_without_the_model_there_is_nothing_to_fit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` then says what to install; to look for the head must not be what fails."""

    def missing(alias: str) -> Path:
        raise ConfigError("not installed")

    monkeypatch.setattr(packaged, "gguf", missing)
    assert packaged.fitting_head(ALIAS, root) is None


@pytest.mark.parametrize("name", [ALIAS, "heads/other", f"heads/../{NAME}", "heads/", f"{NAME}/"])
def test_only_the_name_of_a_head_is_one(root: Path, name: str) -> None:
    """The model's own alias is that of a checkpoint, and no name may lead out of the folder."""
    assert packaged.head(NAME, root) == root / NAME
    assert packaged.head(name, root) is None


def faults(folder: Path) -> list[str]:
    """What keeps a folder of heads from being shipped."""
    return [fault for head in sorted(folder.glob("*")) for fault in faults_of(head)]


def faults_of(head: Path) -> list[str]:
    names, size = {file.name for file in head.iterdir()}, sum(file.stat().st_size for file in head.iterdir())
    needed = {papers.CONFIG, papers.WEIGHTS, papers.REPORT, papers.CARD}
    found = [f"lacks {name}" for name in sorted(needed - names)]
    read = papers.read(head)
    found += ["names no target"] if read is None else [read.problem] if read.problem else []
    return found + ([f"takes {size} bytes"] if size > packaged.MOST_HEAD_BYTES else [])


def test_what_is_shipped_is_small_and_has_its_papers(root: Path) -> None:
    assert faults(Path(gammaray.__file__).parent / packaged.HEADS) == []
    (folder := root / NAME).joinpath(papers.WEIGHTS).write_bytes(bytes(packaged.MOST_HEAD_BYTES))
    lack, changed, large = faults(folder.parent)
    assert lack == f"lacks {papers.CARD}" and "is not what its report.json is of" in changed
    assert large.startswith("takes 120")
