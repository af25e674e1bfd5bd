"""Drafters with papers: a random head beside a tiny target, and a report that fits both."""

from __future__ import annotations

from pathlib import Path

from tiny import tiny_llama

from gammaray import papers
from gammaray.engine import identity
from gammaray.papers import AcceptanceReport, Spread, Workload
from support import heads

ONE = Workload(name="chat", prompts=2, rounds=40, alpha=0.6, tau=2.0, speedup=1.5)
VOCAB = 257  # of support/checkpoint.py


def head(folder: Path, model: str, layers: int = 3) -> Path:
    """A random EAGLE-3 head for a checkpoint of support/checkpoint.py, tied to its weights."""
    target = tiny_llama(VOCAB, layers=layers)
    config = heads.settings(target, eagle_config={}, gammaray_target=identity.of(model))
    heads.write(folder, heads.eagle3(target, list(range(0, VOCAB, 2))), config)
    return folder


def report(folder: Path, **changed: object) -> AcceptanceReport:
    """Of figures that nobody measured, for a folder that has papers."""
    made = AcceptanceReport(
        method="eagle3",
        target="tiny",
        target_sha256=papers.made_for(folder) or "",
        drafter_sha256=papers.digest(folder) or "",
        data="prompts.jsonl",
        dtype="float32",
        temperature=0.0,
        seed=0,
        gamma=4,
        width=1,
        max_tokens=64,
        alpha=Spread(requests=2, p5=0.5, p50=0.6, p95=0.7),
        total=ONE.model_copy(update={"name": "all"}),
        workloads=[ONE],
        survival=[0.6, 0.5],
        drafting=1.0,
        latency_ratio=0.1,
        verify_ratio=1.1,
        kl=0.0,
        speedup_predicted=1.4,
        equal=True,
        machine={},
    )
    return made.model_copy(update=changed)


def write(folder: Path, **changed: object) -> None:
    """That report into its folder."""
    (folder / papers.REPORT).write_text(report(folder, **changed).model_dump_json())
