"""`gammaray bench engine`: drafters against plain decoding, one request at a time, on one engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gammaray import drafter_names
from gammaray.config import Config
from gammaray.drafter_config import CompositeDrafter
from gammaray.drafter_names import Arm
from gammaray.engine import loading
from gammaray.engine.bench import dataset
from gammaray.engine.bench.dataset import Prompt
from gammaray.engine.bench.machine import machine
from gammaray.engine.bench.measure import Measured, Skipped, measure
from gammaray.engine.bench.report import Report, figure
from gammaray.engine.build import build_engine
from gammaray.errors import ConfigError
from gammaray.kernels.bench import output
from gammaray.kernels.bench.report import versions
from gammaray.types import ModelInfo, SamplingParams

EXITS = (2 / 3, 9 / 10)  # of the target's layers
WITHOUT_WEIGHTS = ("ngram", "suffix", "recycle@4x4", "lookahead@6x3", "ngram+recycle@4x4")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a command line asks for."""

    target: Mapping[str, Any]  # of a configuration
    given: Mapping[str, Any]  # drafters of a configuration, by name
    drafters: str | None  # names; None: those given, else what needs no weights of its own
    gamma: int
    width: int
    dtype: str
    file: Path | None  # of prompts; None: the built-in ones
    limit: int
    sampling: SamplingParams
    adaptive: bool
    out: Path | None
    command: str


def run(wanted: Wanted, as_json: bool) -> int:
    """Print a report, and write it into `wanted.out`. Returns the exit code: 1 where an output differs, a
    prompt failed or the run was interrupted. Raises ConfigError."""
    files = _files(wanted.out)
    prompts = _prompts(wanted)
    arms = _arms(wanted)
    named = drafter_names.known([arm.drafter for arm in arms], wanted.given, wanted.dtype)
    config = _needed(drafter_names.alone(wanted.target, wanted.dtype, named), arms)
    engine = build_engine(config)
    report = Report(_about(wanted, engine.info, arms), [arm.label for arm in arms], engine.info.dtype)
    tokenizer = loading.load_tokenizer(config.target.model)
    try:
        for one in measure(engine, tokenizer, arms, prompts, wanted.sampling, wanted.adaptive):
            _note(report, one, len(prompts))
    except KeyboardInterrupt:
        report.interrupted = True
    if not (report.measured or report.failed or report.interrupted):
        reason = report.skipped[0].reason
        raise ConfigError(f"no prompt could be measured; of the first: {reason}")
    print(output.to_json(report) if as_json else report.as_markdown(), flush=True)
    output.write(report, files)
    return int(bool(report.failed) or report.interrupted)


def _about(wanted: Wanted, info: ModelInfo, arms: Sequence[Arm]) -> dict[str, object]:
    return {
        "command": wanted.command,
        "machine": machine(),
        "versions": versions(),
        "model": info.name,
        "dtype": info.dtype,
        "data": wanted.file.name if wanted.file else "built-in prompts",
        "temperature": wanted.sampling.temperature,
        "seed": wanted.sampling.seed,
        "max_tokens": wanted.sampling.max_tokens,
        "adaptive": wanted.adaptive,
        "shapes": {arm.label: f"{arm.gamma} x {arm.width}" for arm in arms},
    }


def _files(folder: Path | None) -> list[Path]:
    """Where the report goes; tried first, as measuring takes minutes. Raises ConfigError."""
    if folder is None:
        return []
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}") from None
    files = [folder / "engine.json", folder / "engine.md"]
    output.check(files)
    return files


def _prompts(wanted: Wanted) -> list[Prompt]:
    found = dataset.read(wanted.file) if wanted.file else dataset.built_in()
    return dataset.spread(found, wanted.limit)


def _arms(wanted: Wanted) -> list[Arm]:
    names = [wanted.drafters] if wanted.drafters is not None else [*map(str, wanted.given)]
    names = names or _defaults(str(wanted.target["model"]))
    return drafter_names.arms(",".join(names), wanted.gamma, wanted.width)


def _defaults(model: str) -> list[str]:
    layers = loading.load_config(model).num_hidden_layers
    exits = dict.fromkeys(min(max(1, round(share * layers)), layers - 1) for share in EXITS)
    return [*WITHOUT_WEIGHTS, *(f"layer_exit:{depth}@3x1" for depth in exits if depth)]


def _needed(config: Config, arms: Sequence[Arm]) -> Config:
    """Without drafters of no arm: they would take memory."""
    names = {arm.drafter for arm in arms}
    composites = [own for name, own in config.drafters.items() if name in names]
    names |= {part for own in composites if isinstance(own, CompositeDrafter) for part in own.drafters}
    return config.model_copy(
        update={"drafters": {name: own for name, own in config.drafters.items() if name in names}}
    )


def _note(report: Report, one: Measured | Skipped, total: int) -> None:
    """Adds a result, and says so on stderr."""
    if isinstance(one, Skipped):
        report.skipped.append(one)
        said = f"{one.prompt}: left out: {one.reason}"
    else:
        report.measured.append(one)
        rates = ", ".join(f"{label} {figure(run.tok_s, '.1f')}" for label, run in one.runs.items())
        plain = figure(one.plain.tok_s, ".1f")
        said = f"{one.prompt.category} {one.prompt.name}: plain {plain}, {rates} tok/s"
    done = len(report.measured) + len(report.skipped)
    print(f"{done}/{total} {said}", file=sys.stderr, flush=True)
