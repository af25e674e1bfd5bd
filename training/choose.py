"""Measures drafters for `funnel.py`, all beside one copy of the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from safetensors import safe_open

from gammaray import drafter_names
from gammaray.config import Config
from gammaray.drafter_config import WEIGHTLESS, CompositeDrafter, Drafter, ModelDrafter
from gammaray.drafter_names import Arm
from gammaray.engine import loading, profile
from gammaray.engine.bench.dataset import Prompt
from gammaray.engine.bench.figures import Row, rows
from gammaray.engine.bench.measure import Measured, Skipped, encode
from gammaray.engine.build import TokenizerDecoder, build_drafter, eos_ids, load_target
from gammaray.engine.drafters import base, provenance
from gammaray.engine.drafters.base import Caching
from gammaray.engine.engine import TOKEN_BUDGET, Engine, EngineOptions
from gammaray.engine.local import run
from gammaray.errors import ConfigError, GammarayError
from gammaray.training import funnel
from gammaray.training.evaluate import GREEDY, held_out, measured
from gammaray.training.funnel import Coarse, Limits, Sharing, Verdict
from gammaray.types import GenerateRequest, Reuse, SamplingParams, SpeculationPlan, StepReport

COARSE_PROMPTS, SHARING_PROMPTS, TURN_TOKENS = 6, 4, 16
LIMITS = Limits()
SECOND_TURN = "\nGo on."


@dataclass(frozen=True, slots=True)
class Wanted:
    target: str
    candidates: str  # NAME,NAME@GAMMAxWIDTH,... as `bench engine --drafters`
    data: Path | None = None
    limit: int = 26
    gamma: int = 4
    width: int = 1
    sampling: SamplingParams = GREEDY
    dtype: str = "float32"
    limits: Limits = LIMITS


class Choosing:
    """One target, and what is measured beside it."""

    def __init__(self, wanted: Wanted, say: Callable[[str], None] = lambda line: None) -> None:
        """Raises ConfigError for a target or names that are wrong."""
        self._wanted, self._say = wanted, say
        self._arms = drafter_names.arms(wanted.candidates, wanted.gamma, wanted.width)
        named = drafter_names.known([arm.drafter for arm in self._arms], {}, wanted.dtype)
        self._prompts = held_out(wanted.data, wanted.limit)
        self._config = drafter_names.alone({"model": wanted.target}, wanted.dtype, named)
        self._runner = load_target(self._config)
        self._tokenizer = loading.load_tokenizer(wanted.target)
        self._profile = profile.measure(self._runner, TOKEN_BUDGET)

    def verdicts(self) -> list[Verdict]:
        """In the order of the candidates. Raises ConfigError where no prompt can be measured."""
        found = [self._sieved(arm) for arm in self._arms]
        left = [arm for arm, one in zip(self._arms, found, strict=True) if not one.reason]
        totals = self._timed(left) if left else {}
        return [one if one.reason else funnel.decided(one, totals, self._wanted.limits) for one in found]

    def _sieved(self, arm: Arm) -> Verdict:
        """As far as it comes alone; without a reason it is to be timed."""
        limits = self._wanted.limits
        one = Verdict(arm.label, "load", False, self._unfit(arm))
        if not one.reason:
            found = self._coarse(arm)
            one = replace(one, sieve="coarse", coarse=found, reason=funnel.coarse(found, limits))
        if not one.reason:
            shared = self._second_turns(arm, self._prompts[:SHARING_PROMPTS])
            one = replace(one, sieve="sharing", sharing=shared, reason=funnel.sharing(shared, limits))
        self._say(f"{arm.label}: {one.reason or 'to be timed'}")
        return one

    def _unfit(self, arm: Arm) -> str:
        """Why it cannot answer at all; empty: it can."""
        try:
            build_drafter(arm.drafter, self._config, self._runner, self._tokenizer)
            return provenance.refused(arm.drafter, self._config.drafters[arm.drafter], self._wanted.target)
        except GammarayError as error:
            return error.message

    def _coarse(self, arm: Arm) -> Coarse:
        few = self._prompts[:COARSE_PROMPTS]
        found = measured(self._engine([arm]), self._tokenizer, [arm], few, self._wanted.sampling)
        own = self._config.drafters[arm.drafter]
        free = all(part.method in WEIGHTLESS for part in self._config.parts(own))
        return Coarse(self._size(own), found.stats(arm.label).alpha, found.latency(arm.drafter), free)

    def _timed(self, arms: Sequence[Arm]) -> dict[str, Row]:
        """Of all prompts together, by the arm's label; drafts are trimmed as a server does."""
        engine, sampling = self._engine(arms), self._wanted.sampling
        found = measured(engine, self._tokenizer, arms, self._prompts, sampling, True, self._progress)
        return {arm.label: rows(arm.label, found.measured)[0] for arm in arms}

    # Parts -------------------------------------------------------------------------------------------

    def _progress(self, one: Measured | Skipped, total: int) -> None:
        self._say(f"  {one.prompt.category if isinstance(one, Measured) else one.reason} ({total} in all)")

    def _engine(self, arms: Sequence[Arm], prefix_cache: bool = False) -> Engine:
        """Fresh drafters of these arms beside the target."""
        config = _caching(self._config) if prefix_cache else self._config
        names = dict.fromkeys(arm.drafter for arm in arms)
        drafters = {name: build_drafter(name, config, self._runner, self._tokenizer) for name in names}
        return self._running(drafters, prefix_cache)

    def _running(self, drafters: Mapping[str, base.Drafter], prefix_cache: bool) -> Engine:
        options = EngineOptions(name=self._wanted.target, max_batch=1, prefix_cache=prefix_cache)
        decoder, eos = TokenizerDecoder(self._tokenizer), eos_ids(self._runner, self._tokenizer)
        return Engine(self._runner, decoder, eos, drafters, options, profile=self._profile)

    def _size(self, own: Drafter) -> float | None:
        target = parameters(Path(loading.resolve(self._wanted.target)))
        found = self._parameters(own)
        return None if found is None or not target else found / target

    def _parameters(self, own: Drafter) -> int | None:
        if isinstance(own, CompositeDrafter):
            parts = [self._parameters(part) for part in self._config.parts(own)]
            return sum(part or 0 for part in parts) if None not in parts else None
        if isinstance(own, ModelDrafter):
            return parameters(Path(loading.resolve(own.model)))
        place = provenance.folder(own)
        return 0 if place is None else parameters(place)

    def _second_turns(self, arm: Arm, prompts: Sequence[Prompt]) -> Sharing:
        """Each prompt is answered, then asked again with its answer and a few tokens more."""
        engine = self._engine([arm], prefix_cache=True)
        plan = SpeculationPlan(arm.drafter, arm.gamma, arm.width)
        sampling = replace(self._wanted.sampling, max_tokens=TURN_TOKENS)
        more = tuple(self._tokenizer(SECOND_TURN, add_special_tokens=False)["input_ids"])
        seen: list[StepReport] = []
        for number, prompt in enumerate(prompts):
            ids = encode(self._tokenizer, prompt)
            answer = run(engine, GenerateRequest(f"{number} first", ids, sampling, plan)).ids
            again = GenerateRequest(f"{number} second", (*ids, *answer, *more), sampling, plan)
            run(engine, again, watch=seen.append)
        own = sum((report.draft_reuse for report in seen), Reuse())
        caches = isinstance(engine.drafters[arm.drafter].inner, Caching)
        return Sharing(sum((report.target_reuse for report in seen), Reuse()), own if caches else None)


def parameters(folder: Path) -> int | None:
    """In the safetensors of a folder, without integers; None where there are none."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    return sum(map(_numbers, files)) if files else None


def _numbers(file: Path) -> int:
    with safe_open(file, framework="pt") as opened:
        slices = [opened.get_slice(key) for key in opened.keys()]  # noqa: SIM118 - it is no mapping
        return sum(prod(one.get_shape()) for one in slices if one.get_dtype().startswith(("F", "BF")))


def _caching(config: Config) -> Config:
    kv = config.target.kv.model_copy(update={"prefix_cache": True})
    return config.model_copy(update={"target": config.target.model_copy(update={"kv": kv})})


def choose(wanted: Wanted, say: Callable[[str], None] = lambda line: None) -> list[Verdict]:
    """A verdict for each candidate. Raises ConfigError."""
    if not wanted.candidates.strip(", "):
        raise ConfigError("--candidates names none")
    return Choosing(wanted, say).verdicts()
