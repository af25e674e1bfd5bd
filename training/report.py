"""The acceptance report of a drafter, and its model card: measured, written into its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np

from gammaray import papers
from gammaray.engine.bench.figures import Row, rows
from gammaray.engine.bench.machine import machine
from gammaray.engine.drafters.head_loading import read_config
from gammaray.errors import ConfigError
from gammaray.papers import AcceptanceReport, Spread, Workload
from gammaray.training import card
from gammaray.training.evaluate import Found, Note, Wanted, evaluate, label
from gammaray.training.files import replacing
from gammaray.types import MEANINGFUL, SpeculationStats

BUILT_IN = "built-in prompts"
RUN, MADE, ABOUT = "run.json", "made.json", "data/corpus/about.json"  # of a run, see command.py
MARKS = {  # method -> the key of config.json that only its drafters have
    "medusa": "medusa_num_heads",
    "dspark": "markov_rank",
    "eagle3": "eagle_config",
}


def report(
    wanted: Wanted,
    folder: Path,
    note: Note = lambda one, total: None,
) -> AcceptanceReport:
    """Measure the drafter in `folder`, and write report.json, README.md and run.json into it.

    Raises ConfigError, also for a folder whose config.json names another target than the one that is
    measured, or none.
    """
    target, weights = papers.made_for(folder), papers.digest(folder)
    if target is None or weights is None:
        raise ConfigError(f"`gammaray train` did not make {folder}: it has no {papers.TARGET}, or no weights")
    known = facts(folder)
    if wanted.data and known.get("questions") == f"sha256 {papers.sha256(wanted.data)}":
        raise ConfigError(
            f"{folder} learned from the very prompts in {wanted.data}: give others to judge it by"
        )
    made = made_of(wanted, evaluate(wanted, note), target, weights)
    with replacing(folder / papers.REPORT) as work:
        work.write_text(made.model_dump_json(indent=1) + "\n", encoding="utf-8")
    with replacing(folder / papers.CARD) as work:
        work.write_text(card.text(made, known), encoding="utf-8")
    if known:
        with replacing(folder / RUN) as work:
            work.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return made


def entry(folder: Path) -> dict[str, Any]:
    """The drafter in a folder that `gammaray train` made, as an entry of `drafters`. Raises ConfigError."""
    found = read_config(folder)
    kinds = [method for method, key in MARKS.items() if key in found]
    if not kinds:
        raise ConfigError(f"{folder / papers.CONFIG} is of no drafter that `gammaray train` makes")
    return {"method": kinds[0], "path": str(folder)}


def facts(folder: Path) -> dict[str, object]:
    """How a drafter was made, and under `made` what came of it: as noted beside it, else by the run that its
    folder belongs to. Empty: nobody knows."""
    if beside := _json(folder / RUN):
        return beside
    run, made, about = (_json(folder.parent / name) for name in (RUN, MADE, ABOUT))
    more = {"questions": about.get("questions"), "made": made}
    return run and run | {name: value for name, value in more.items() if value}


def _json(file: Path) -> dict[str, object]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def made_of(wanted: Wanted, found: Found, target: str, weights: str) -> AcceptanceReport:
    """`target` and `weights`: hashes, of the target's weights and the drafter's. Raises ConfigError when the
    drafter never drafted."""
    name = label(wanted.drafter)
    stats, own, plain_s = found.stats(name), found.rounds[name], found.plain_s
    survival = survivals(stats)
    if not survival:
        raise ConfigError(f"{name} drafted nothing on these prompts: give longer answers, or other prompts")
    total, *parts = (_workload(row) for row in rows(name, found.measured) if row.rounds)
    drafting = stats.level_tested[0] / stats.rounds
    drafts, verify = (seconds / own.count / plain_s for seconds in (own.draft_s, own.other_s))
    return AcceptanceReport(
        method=name,
        target=wanted.target,
        target_sha256=target,
        drafter_sha256=weights,
        data=wanted.data.name if wanted.data else BUILT_IN,
        dtype=found.dtype,
        temperature=wanted.sampling.temperature,
        seed=wanted.sampling.seed,
        gamma=wanted.gamma,
        width=wanted.width,
        max_tokens=wanted.sampling.max_tokens,
        alpha=spread([run.stats for run in found.runs(name)]),
        total=total,
        workloads=parts,
        survival=survival,
        drafting=drafting,
        latency_ratio=found.latency(name),
        verify_ratio=verify,
        kl=_mean_kl(found),
        speedup_predicted=expected_tau(survival, drafting) / (verify + drafts),
        equal=_equal(found, name),
        machine=machine(),
    )


def survivals(stats: SpeculationStats) -> list[float]:
    """[j]: how often level j was accepted, by any child, where it was tested."""
    pairs = zip_longest(stats.level_accepted, stats.level_tested, fillvalue=0)  # hits may be fewer
    return [accepted / tested for accepted, tested in pairs if tested]


def expected_tau(survival: Sequence[float], drafting: float = 1.0) -> float:
    """E[tau] = 1 + sum over levels of the product of `survival` up to there, in the share `drafting` of the
    rounds (math.md section 2)."""
    return float(1 + drafting * sum(accumulate(survival, mul)))


def spread(requests: Sequence[SpeculationStats]) -> Spread | None:
    """Of alpha over requests with enough tested tokens; None when there is none."""
    alphas = [stats.first_accepted / stats.tested for stats in requests if stats.tested >= MEANINGFUL]
    if not alphas:
        return None
    p5, p50, p95 = np.percentile(alphas, [5, 50, 95]).tolist()
    return Spread(requests=len(alphas), p5=p5, p50=p50, p95=p95)


def _workload(row: Row) -> Workload:
    assert row.tau is not None  # it has rounds
    return Workload(
        name=row.category,
        prompts=row.prompts,
        rounds=row.rounds,
        alpha=row.alpha,
        tau=row.tau,
        speedup=row.speedup,
    )


def _mean_kl(found: Found) -> float | None:
    tokens = sum(one.tokens for one in found.audits)
    return sum(one.tokens * one.kl for one in found.audits) / tokens if tokens else None


def _equal(found: Found, name: str) -> bool | None:
    if found.dtype != "float32":
        return None
    return all(one.runs[name].ids == one.plain.ids for one in found.measured)
