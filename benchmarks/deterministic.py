"""What `target.deterministic` costs and what it buys: the embedded model with and without it, in one process.

    python benchmarks/deterministic.py [--parts cost identity] [--requests 200] [--repeats 40] [--out FOLDER]

Cost: the time of one forward pass at a context, and decode throughput at concurrency 1; the two modes take
turns, and ratios are medians over neighbours. Both modes share one copy of the weights: where these happen to
lie in memory changes the speed of a mode by up to 20 %.
Identity: each request alone and plain, alone with drafts, and among others (tests/support/identity.py); a
request counts as identical when ids, log-probabilities and finish are equal to the bit in all these ways.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from generate import MODEL, PROMPTS, machine  # sets the threads before torch is imported
from support.identity import outcomes, same_bits, workload
from torch.nn import functional as F

from gammaray.engine.batch import Row
from gammaray.engine.build import TokenizerDecoder, eos_ids
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.loading import load_runner, load_tokenizer
from gammaray.engine.local import run
from gammaray.engine.runner import ModelRunner
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan

Step = Callable[[ModelRunner], object]
Runners = Mapping[str, ModelRunner]  # by mode
MODES = ("default", "deterministic")
CONTEXTS = (256, 450)
PLANS = {"plain": PLAIN, "n-gram": SpeculationPlan("ngram", 8, 1)}
BLOCKS = 44  # of 16 tokens, for each of 16 sequences


def steps(context: int) -> dict[str, Step]:
    tokens = [(7 * i) % 4000 + 100 for i in range(context + 300)]

    def blocks(sequence: int) -> range:
        return range(BLOCKS * sequence, BLOCKS * (sequence + 1))

    def row(sequence: int, nodes: int = 0) -> Row:
        draft = tokens[context + 1 : context + 1 + nodes]
        return Row(tokens[context : context + 1], context, blocks(sequence), draft, range(-1, nodes - 1))

    tree = Row(
        tokens[context : context + 1],
        context,
        blocks(0),
        tokens[context + 1 : context + 17],
        [-1, -1, 0, 0, *range(2, 14)],
    )
    lengths = range(max(16, context - 240), context + 240, 30)  # 16 of them
    mixed = [Row(tokens[n : n + 1], n, blocks(i)) for i, n in enumerate(lengths)]
    return {
        "prefill 256": lambda runner: runner.forward([Row(tokens[:256], 0, blocks(0))]),
        "decode, batch 1": lambda runner: runner.forward([row(0)]),
        "decode, batch 8": lambda runner: runner.forward([row(i) for i in range(8)]),
        "decode, batch 16": lambda runner: runner.forward([row(i) for i in range(16)]),
        "decode, batch 16, contexts from -240 to +210": lambda runner: runner.forward(mixed),
        "verify 5, batch 1": lambda runner: runner.forward([row(0, 4)]),
        "verify 9, batch 1": lambda runner: runner.forward([row(0, 8)]),
        "verify a tree of 16 in two branches": lambda runner: runner.forward([tree]),
    }


def with_default_arithmetic(runner: ModelRunner) -> ModelRunner:
    """The default mode of a deterministic runner, on the same packed weights and pool."""
    lean = copy.copy(runner._model._model)
    lean._silu, lean._head = F.silu, _bare(lean._head)
    names = ("qkv", "out", "gate_up", "down")
    lean._layers = [
        replace(layer, **{name: _bare(getattr(layer, name)) for name in names}) for layer in lean._layers
    ]
    default = copy.copy(runner)
    default._model, default._sizes = lean, None
    return default


def _bare(forward: Any) -> Any:
    """The layer inside of an invariant one, both given by their bound `forward`."""
    return forward.__self__._layer.forward


def in_turns(
    measure: Callable[[ModelRunner], float], runners: Runners, rounds: int
) -> dict[str, list[float]]:
    """What `measure` gives for each mode, which take turns in going first."""
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for turn in range(rounds):
        for mode in MODES if turn % 2 else MODES[::-1]:
            found[mode].append(measure(runners[mode]))
    return found


def pass_costs(runners: Runners, repeats: int) -> list[dict[str, object]]:
    rows = []
    for context in CONTEXTS:
        for sequence in range(16):
            table = range(BLOCKS * sequence, BLOCKS * (sequence + 1))
            prompt = [(7 * i) % 4000 + 100 for i in range(16 * BLOCKS)]
            runners["deterministic"].forward([Row(prompt, 0, table, logits=0)])
        for name, step in steps(context).items():
            prefill = name == "prefill 256"
            if prefill and context != CONTEXTS[0]:
                continue
            in_turns(partial(_seconds, step), runners, 2)
            times = in_turns(partial(_seconds, step), runners, max(6, repeats // 4) if prefill else repeats)
            rows.append(
                {
                    "case": name,
                    "context": 0 if prefill else context,
                    **{f"{mode}_ms": round(1e3 * median(times[mode]), 1) for mode in MODES},
                    "ratio": _ratio(times["deterministic"], times["default"]),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def throughput(runners: Runners, max_tokens: int, repeats: int) -> list[dict[str, object]]:
    tokenizer = load_tokenizer(MODEL)
    decoder, eos = TokenizerDecoder(tokenizer), eos_ids(runners["default"], tokenizer)
    rows = []
    for name in ("code-rename", "chat"):
        message = [{"role": "user", "content": PROMPTS[name]}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for plan_name, plan in PLANS.items():
            request = GenerateRequest("benchmark", tuple(prompt["input_ids"]), sampling, plan)

            def rate(runner: ModelRunner, request: GenerateRequest = request) -> float:
                options = EngineOptions(prefix_cache=False)
                return (
                    run(Engine(runner, decoder, eos, {"ngram": NgramDrafter()}, options), request).tok_s or 0
                )

            rates = in_turns(rate, runners, repeats)
            rows.append(
                {
                    "prompt": name,
                    "plan": plan_name,
                    **{f"{mode}_tok_s": round(median(rates[mode]), 1) for mode in MODES},
                    "ratio": _ratio(rates["default"], rates["deterministic"]),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _ratio(slower: list[float], faster: list[float]) -> float:
    return round(median(a / b for a, b in zip(slower, faster, strict=True)), 3)


def cost(dtype: str, repeats: int) -> dict[str, object]:
    runner = load_runner(MODEL, dtype, num_blocks=16 * BLOCKS, deterministic=True)
    runners = {"deterministic": runner, "default": with_default_arithmetic(runner)}
    return {
        "dtype": dtype,
        "passes": pass_costs(runners, repeats),
        "throughput": throughput(runners, max_tokens=60, repeats=max(4, repeats // 5)),
    }


def identity(count: int, deterministic: bool) -> dict[str, object]:
    """How many of `count` requests have the bits, and the ids, of plain decoding alone."""
    tokenizer = load_tokenizer(MODEL)
    runner = load_runner(MODEL, "bfloat16", num_blocks=16, deterministic=deterministic)
    ways = outcomes(runner, TokenizerDecoder(tokenizer), workload(count, tokenizer))
    _, plain = next(ways)
    same = dict.fromkeys(plain, True)
    same_ids = dict.fromkeys(plain, True)
    rows = []
    for name, found in ways:
        bits = {rid: same_bits(found[rid], plain[rid]) for rid in plain}
        ids = {rid: found[rid].ids == plain[rid].ids for rid in plain}
        same = {rid: same[rid] and bits[rid] for rid in plain}
        same_ids = {rid: same_ids[rid] and ids[rid] for rid in plain}
        accepted = sum(outcome.stats.accepted for outcome in found.values() if outcome.stats)
        rows.append({"way": name, "bits": sum(bits.values()), "ids": sum(ids.values()), "accepted": accepted})
        print(json.dumps({"deterministic": deterministic, **rows[-1]}), flush=True)
    return {
        "deterministic": deterministic,
        "dtype": "bfloat16",
        "requests": count,
        "tokens": sum(len(outcome.ids) for outcome in plain.values()),
        "identical_bits": sum(same.values()),
        "identical_ids": sum(same_ids.values()),
        "ways": rows,
    }


def table(report: dict[str, dict[str, object]]) -> str:
    lines = ["# Deterministic mode: cost and effect", ""]
    for part in ("cost", "identity"):
        if part in report:
            lines += [
                f"## {part.capitalize()}",
                "",
                f"Machine: `{json.dumps(report[part]['machine'])}`",
                f"Command: `{report[part]['command']}`",
                "",
                *(_cost_lines(report[part]) if part == "cost" else _identity_lines(report[part])),
                "",
            ]
    return "\n".join(lines).rstrip() + "\n"


def _cost_lines(report: dict[str, object]) -> list[str]:
    lines = [
        "Milliseconds of one pass; the baseline is the default mode of the same model, in turns with it. "
        "Above 1: the deterministic mode is slower.",
        "",
        "| dtype | pass | context | default | deterministic | ratio |",
        "|---|---|---|---|---|---|",
    ]
    results = report["results"]
    assert isinstance(results, list)
    for result in results:
        lines += [
            f"| {result['dtype']} | {r['case']} | {r['context']} | {r['default_ms']} "
            f"| {r['deterministic_ms']} | **{r['ratio']}** |"
            for r in result["passes"]
        ]
    lines += [
        "",
        "Decode tokens per second at concurrency 1, temperature 0; ratio of the times.",
        "",
        "| dtype | prompt | plan | default | deterministic | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        lines += [
            f"| {result['dtype']} | {r['prompt']} | {r['plan']} | {r['default_tok_s']} "
            f"| {r['deterministic_tok_s']} | **{r['ratio']}** |"
            for r in result["throughput"]
        ]
    return lines


def _identity_lines(report: dict[str, object]) -> list[str]:
    lines = [
        "Requests whose output is that of plain decoding alone, of all; the baseline is the default mode. "
        "`guesser` drafts the right token four times out of five; G x W is depth x width.",
        "",
        "| mode | way | same bits | same ids | accepted draft tokens |",
        "|---|---|---|---|---|",
    ]
    results = report["results"]
    assert isinstance(results, list)
    for result in results:
        mode = "deterministic" if result["deterministic"] else "default"
        lines += [
            f"| {mode} | {r['way']} | {r['bits']} | {r['ids']} | {r['accepted']} |" for r in result["ways"]
        ]
        lines.append(
            f"| **{mode}** | **all of these**, {result['requests']} requests, {result['tokens']} tokens, "
            f"{result['dtype']} | **{result['identical_bits']}** | **{result['identical_ids']}** | |"
        )
    return lines


def _seconds(step: Step, runner: ModelRunner) -> float:
    began = time.perf_counter()
    step(runner)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", default=["cost", "identity"], choices=["cost", "identity"])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "deterministic.json"
    report = json.loads(file.read_text()) if file.exists() else {}  # a part that is not run stays
    if "cost" in given.parts:
        results: list[object] = [cost(dtype, given.repeats) for dtype in ("bfloat16", "float32")]
        command = f"python benchmarks/deterministic.py --parts cost --repeats {given.repeats}"
        report["cost"] = {"machine": machine(), "command": command, "results": results}
    if "identity" in given.parts:
        results = [identity(given.requests, deterministic) for deterministic in (True, False)]
        command = f"python benchmarks/deterministic.py --parts identity --requests {given.requests}"
        report["identity"] = {"machine": machine(), "command": command, "results": results}
    file.write_text(json.dumps(report, indent=1) + "\n")
    (given.out / "deterministic.md").write_text(table(report))


if __name__ == "__main__":
    main()
