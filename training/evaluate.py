"""How a drafter does on held-out prompts: acceptance, speed and quality, one request at a time.

Drafts are verified whole, as alpha is to be that of the drafter. Times of rounds are those that the engine
itself reports, so that prefill is in none of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gammaray import drafter_names
from gammaray.drafter_names import Arm
from gammaray.engine import loading
from gammaray.engine.bench import dataset
from gammaray.engine.bench.dataset import Prompt
from gammaray.engine.bench.measure import Measured, Skipped, encode, measure
from gammaray.engine.build import build_engine
from gammaray.engine.engine import Engine
from gammaray.engine.local import Run, run
from gammaray.errors import ConfigError
from gammaray.types import (
    GenerateRequest,
    PolicySnapshot,
    Quality,
    SamplingParams,
    SpeculationPlan,
    SpeculationStats,
    StepReport,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Note = Callable[[Measured | Skipped, int], None]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
AUDITED = 4  # prompts whose KL is taken: each costs a dense pass
WARM_UP = "warm-up"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is measured, and how."""

    target: str
    drafter: Mapping[str, Any]  # its entry, as in `drafters` of a configuration
    data: Path | None = None  # held-out prompts in a form of bench/dataset.py; None: the built-in ones
    limit: int = 26
    gamma: int = 4
    width: int = 1
    sampling: SamplingParams = GREEDY
    dtype: str = "float32"


@dataclass(slots=True)
class Rounds:
    """Decode rounds of one request at a time, added up. Times in seconds."""

    count: int = 0
    drafted: int = 0  # nodes
    draft_s: float = 0.0
    other_s: float = 0.0  # of the rounds, but for drafting

    def add(self, report: StepReport) -> None:
        stats = sum((one.stats for one in report.counts), SpeculationStats())
        if stats.rounds:
            self.count += stats.rounds
            self.drafted += stats.drafted
            self.draft_s += report.draft_s
            self.other_s += report.schedule_s + report.verify_s + report.commit_s


@dataclass(slots=True)
class Found:
    """`rounds` of plain decoding, under None, and with each drafter."""

    measured: list[Measured] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    rounds: dict[str | None, Rounds] = field(default_factory=lambda: defaultdict(Rounds))
    audits: list[Quality] = field(default_factory=list)
    dtype: str = ""

    def runs(self, label: str) -> list[Run]:
        return [one.runs[label] for one in self.measured]

    def stats(self, label: str) -> SpeculationStats:
        return sum((run.stats for run in self.runs(label)), SpeculationStats())

    @property
    def plain_s(self) -> float:
        """T_AR: what a round of plain decoding takes. 0: there was none."""
        plain = self.rounds[None]
        return (plain.draft_s + plain.other_s) / plain.count if plain.count else 0.0

    def latency(self, drafter: str) -> float:
        """T_draft per drafted token, of T_AR."""
        own = self.rounds[drafter]
        return own.draft_s / max(1, own.drafted) / self.plain_s


def evaluate(wanted: Wanted, note: Note = lambda one, total: None) -> Found:
    """`note` gets each result and how many there will be. Raises ConfigError, also where no prompt could be
    measured."""
    name = label(wanted.drafter)
    config = drafter_names.alone({"model": wanted.target}, wanted.dtype, {name: wanted.drafter})
    engine, tokenizer = build_engine(config), loading.load_tokenizer(wanted.target)
    arm, prompts = Arm(name, name, wanted.gamma, wanted.width), held_out(wanted.data, wanted.limit)
    found = measured(engine, tokenizer, [arm], prompts, wanted.sampling, note=note)
    audited = [one.prompt for one in found.measured[:AUDITED]]
    found.audits = audit(engine, tokenizer, arm, audited, wanted.sampling)
    return found


def held_out(data: Path | None, limit: int) -> list[Prompt]:
    """Prompts of a file, else the built-in ones. Raises ConfigError."""
    return dataset.spread(dataset.read(data) if data else dataset.built_in(), limit)


def label(drafter: Mapping[str, Any]) -> str:
    return str(drafter["method"])


def measured(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    adaptive: bool = False,
    note: Note = lambda one, total: None,
) -> Found:
    """All arms on all prompts, in turns. Raises ConfigError where no prompt could be measured, or timed."""
    found = Found(dtype=engine.info.dtype)

    def watched(engine: Engine, request: GenerateRequest) -> Run:
        if request.request_id == WARM_UP:
            return run(engine, request)
        return run(engine, request, watch=found.rounds[request.plan.drafter].add)

    for one in measure(engine, tokenizer, arms, prompts, sampling, adaptive, watched):
        note(one, len(prompts))
        if isinstance(one, Skipped):
            found.skipped.append(one)
        else:
            found.measured.append(one)
    if not found.measured:
        raise ConfigError(f"no prompt could be measured; of the first: {found.skipped[0].reason}")
    if not found.plain_s:
        raise ConfigError("answers of one token cannot be timed: allow more tokens, or give other prompts")
    return found


def audit(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    arm: Arm,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
) -> list[Quality]:
    """KL(p_dense || p_verify) of what is generated with the drafter; apart, as it takes time that counts."""
    plan, before, found = SpeculationPlan(arm.drafter, arm.gamma, arm.width), engine.policy, list[Quality]()

    def watch(report: StepReport) -> None:
        found.extend(one.quality for one in report.finished if one.quality is not None)

    for number, prompt in enumerate(prompts):
        request = GenerateRequest(f"audit {number}", encode(tokenizer, prompt), sampling, plan)
        key = request.tenant, request.request_class, arm.drafter
        engine.apply(PolicySnapshot(audit=frozenset({key})))
        run(engine, request, watch=watch)
    engine.apply(before)
    return found
