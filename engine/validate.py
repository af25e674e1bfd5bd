"""The chain check behind `gammaray validate`: from the checkpoint to the scheduler, link by link.

checkpoint -> paged attention -> tensor parallel -> KV layout -> drafter -> vocabulary -> verifier
-> scheduler -> on/off run
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from gammaray.config import NO_KEYS, Config
from gammaray.drafter_config import ModelDrafter as ModelDrafterConfig
from gammaray.engine import loading
from gammaray.engine.build import TokenizerDecoder, build_drafter, eos_ids
from gammaray.engine.describe import describe
from gammaray.engine.drafters import provenance
from gammaray.engine.drafters.base import Drafter
from gammaray.engine.engine import TOKEN_BUDGET, Engine, EngineOptions
from gammaray.engine.local import run
from gammaray.engine.runner import ModelRunner
from gammaray.engine.sharding import check_heads
from gammaray.errors import GammarayError
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan

PROMPTS = (
    "Repeat this line three times: the quick brown fox jumps over the lazy dog.",
    "List the numbers from one to ten, then list them again.",
)
RUN_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    detail: str


def report(config: Config, determinism: bool, as_json: bool) -> int:
    """`gammaray validate`. Prints each check as it is done and returns the exit code."""
    checks = []
    for check in validate(config, determinism):
        checks.append(check)
        if not as_json:
            print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.detail}", flush=True)
    ok = all(check.ok for check in checks)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [asdict(check) for check in checks]}))
    return 0 if ok else 1


def validate(config: Config, determinism: bool = False) -> Iterator[Check]:
    """Checks in order; a failed link ends the chain that hangs on it. Never raises for a bad checkpoint."""
    target = config.target
    try:
        dtype = "float32" if determinism else target.dtype
        runner = loading.load_runner(
            target.model,
            dtype=dtype,
            block_size=target.kv.block_size,
            num_blocks=target.kv.num_blocks,
            memory=target.kv.memory,
            max_model_len=target.max_model_len,
            deterministic=target.deterministic,
        )
        tokenizer = loading.load_tokenizer(target.model)
    except GammarayError as error:
        yield Check("target", False, error.message)
        return
    yield Check("target", True, _target(target.model, runner))
    yield Check("paged attention", True, "equals the dense model on a packed prefill and a draft tree")
    if target.tensor_parallel > 1:
        yield _tensor_parallel(target.model, target.tensor_parallel)
    yield validate_kv_layout(runner)
    drafters: dict[str, Drafter] = {}
    built = _in_float32(config) if determinism else config
    for name in config.drafters:
        try:
            drafters[name] = build_drafter(name, built, runner, tokenizer)
        except GammarayError as error:
            yield Check(f"drafter {name}", False, error.message)
            continue
        if refused := provenance.refused(name, config.drafters[name], target.model):
            yield Check(f"drafter {name}", False, refused)
            continue
        yield Check(f"drafter {name}", True, describe(name, config, drafters[name], runner))
    yield _scheduler(config)
    if unreachable := config.unreachable_tenants():
        yield Check("tenants", False, f"{', '.join(unreachable)}: {NO_KEYS}")
    if determinism:
        decoder = TokenizerDecoder(tokenizer)
        options = EngineOptions(prefix_cache=False, oracle=True)
        engine = Engine(runner, decoder, eos_ids(runner, tokenizer), drafters, options)
        prompts = [tuple(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
        for name in drafters:
            yield on_off(engine, name, prompts)


def _in_float32(config: Config) -> Config:
    """Drafters that have a dtype of their own; the others have the target's."""
    models = {
        name: own.model_copy(update={"dtype": "float32"})
        for name, own in config.drafters.items()
        if isinstance(own, ModelDrafterConfig)
    }
    return config.model_copy(update={"drafters": {**config.drafters, **models}})


def validate_kv_layout(runner: ModelRunner) -> Check:
    """Whether the pool holds one sequence of full length; a server with less serves shorter ones only."""
    size, length = runner.block_size, runner.max_model_len
    detail = f"{runner.num_blocks} blocks of {size} tokens for sequences of up to {length}"
    if runner.num_blocks * size >= length:
        return Check("KV layout", True, detail)
    hint = f"raise kv.num_blocks to {-(-length // size)} or set max_model_len to {runner.num_blocks * size}"
    return Check("KV layout", False, f"{detail}: {hint}")


def _tensor_parallel(model: str, ranks: int) -> Check:
    """Whether every rank gets whole heads. The weights are loaded in one process here, and not cut."""
    try:
        check_heads(model, loading.load_config(model), ranks)
    except GammarayError as error:
        return Check("tensor parallel", False, error.message)
    return Check(
        "tensor parallel", True, f"{ranks} ranks get whole heads each; `serve` checks the cut itself"
    )


def on_off(engine: Engine, drafter: str, prompts: list[tuple[int, ...]]) -> Check:
    """The same tokens with speculation off and on, greedy and seeded, chain and tree."""
    accepted = 0
    for prompt in prompts:
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=RUN_TOKENS)
            request = GenerateRequest("validate", prompt, sampling)
            expected = run(engine, replace(request, plan=PLAIN))
            for width in (1, 2):
                try:
                    found = run(engine, replace(request, plan=SpeculationPlan(drafter, 4, width)))
                except GammarayError as error:
                    return Check(f"on/off {drafter}", False, error.message)
                accepted += found.stats.accepted
                if found.ids != expected.ids:
                    where = f"temperature {temperature}, width {width}"
                    return Check(f"on/off {drafter}", False, f"tokens differ at {where}")
    detail = f"equal tokens in float32, greedy and seeded, chain and tree; {accepted} draft tokens accepted"
    return Check(f"on/off {drafter}", True, detail)


def _target(model: str, runner: ModelRunner) -> str:
    precision = str(runner.dtype).removeprefix("torch.")
    return f"{model}: {runner.num_layers} layers, {runner.vocab_size} tokens, {precision}"


def _scheduler(config: Config) -> Check:
    budget = config.target.token_budget or TOKEN_BUDGET
    ok = budget >= config.target.max_batch
    detail = f"{budget} tokens a step for up to {config.target.max_batch} sequences"
    return Check("scheduler", ok, detail if ok else detail + ": raise token_budget or lower max_batch")
