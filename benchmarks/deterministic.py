"""What `target.deterministic` costs and what it buys: the embedded model with and without it, in one process.

    python benchmarks/deterministic.py [--parts cost identity] [--requests 200] [--repeats 40] [--out FOLDER]

Cost: the time of one forward pass at a context, and decode throughput at concurrency 1; the two modes take
turns, and figures are medians of the ratio of neighbours. Each mode is loaded twice, in the order ABBA: where
its weights happen to lie in memory changes a model's speed by several percent.
Identity: each request alone and plain, alone with drafts, and among others (tests/support/identity.py); a
request counts as identical when ids, log-probabilities and finish are equal to the bit in all these ways.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from generate import MODEL, PROMPTS, machine  # sets the threads before torch is imported
from support.identity import outcomes, same_bits, workload

from gammaray.engine.batch import Row
from gammaray.engine.build import TokenizerDecoder, eos_ids
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.loading import load_runner, load_tokenizer
from gammaray.engine.local import run
from gammaray.engine.runner import ModelRunner
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan

Step = Callable[[ModelRunner], object]
MODES = (False, True, True, False)  # deterministic; interleaved, see above
CONTEXTS = (256, 448)
PLANS = {"plain": PLAIN, "n-gram": SpeculationPlan("ngram", 8, 1)}
BLOCKS = 40  # of 16 tokens, for each of 16 sequences


def steps(context: int) -> dict[str, Step]:
    tokens = [(7 * i) % 4000 + 100 for i in range(context + 40)]

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
    return {
        "prefill 256": lambda runner: runner.forward([Row(tokens[:256], 0, blocks(0))]),
        "decode, batch 1": lambda runner: runner.forward([row(0)]),
        "decode, batch 8": lambda runner: runner.forward([row(i) for i in range(8)]),
        "decode, batch 16": lambda runner: runner.forward([row(i) for i in range(16)]),
        "verify 5, batch 1": lambda runner: runner.forward([row(0, 4)]),
        "verify 9, batch 1": lambda runner: runner.forward([row(0, 8)]),
        "verify a tree of 16 in two branches": lambda runner: runner.forward([tree]),
    }


def pass_costs(runners: list[ModelRunner], repeats: int) -> list[dict[str, object]]:
    rows = []
    for context in CONTEXTS:
        for runner in runners:
            for sequence in range(16):
                table = range(BLOCKS * sequence, BLOCKS * (sequence + 1))
                runner.forward([Row([(7 * i) % 4000 + 100 for i in range(context)], 0, table, logits=0)])
        for name, step in steps(context).items():
            if name == "prefill 256" and context != CONTEXTS[0]:
                continue
            rounds = max(5, repeats // 5) if name == "prefill 256" else repeats
            times = [[_seconds(step, runner) for runner in runners] for _ in range(rounds + 2)][2:]
            ratio = median((b + c) / (a + d) for a, b, c, d in times)
            default, deterministic = (
                1e3 * median(t[i] for t in times for i in range(4) if MODES[i] is mode)
                for mode in (False, True)
            )
            rows.append(
                {
                    "case": name,
                    "context": context,
                    "default_ms": round(default, 1),
                    "deterministic_ms": round(deterministic, 1),
                    "ratio": round(ratio, 3),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def throughput(runners: list[ModelRunner], max_tokens: int, repeats: int) -> list[dict[str, object]]:
    tokenizer = load_tokenizer(MODEL)
    engines = [
        Engine(
            runner,
            TokenizerDecoder(tokenizer),
            eos_ids(runner, tokenizer),
            {"ngram": NgramDrafter()},
            EngineOptions(prefix_cache=False),
        )
        for runner in runners
    ]
    rows = []
    for name in ("code-rename", "chat"):
        message = [{"role": "user", "content": PROMPTS[name]}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        for plan_name, plan in PLANS.items():
            request = GenerateRequest("benchmark", tuple(prompt["input_ids"]), sampling, plan)
            rounds = [[run(engine, request).tok_s or 0.0 for engine in engines] for _ in range(repeats)]
            default, deterministic = (
                median(r[i] for r in rounds for i in range(4) if MODES[i] is mode) for mode in (False, True)
            )
            rows.append(
                {
                    "prompt": name,
                    "plan": plan_name,
                    "default_tok_s": round(default, 1),
                    "deterministic_tok_s": round(deterministic, 1),
                    "ratio": round(median((a + d) / (b + c) for a, b, c, d in rounds), 3),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def cost(dtype: str, repeats: int) -> dict[str, object]:
    runners = [load_runner(MODEL, dtype, num_blocks=16 * BLOCKS, deterministic=mode) for mode in MODES]
    return {
        "dtype": dtype,
        "passes": pass_costs(runners, repeats),
        "throughput": throughput(runners, max_tokens=60, repeats=max(3, repeats // 10)),
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
            f"| {result['dtype']} | {r['case']} | {0 if r['case'] == 'prefill 256' else r['context']} "
            f"| {r['default_ms']} | {r['deterministic_ms']} | **{r['ratio']}** |"
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
