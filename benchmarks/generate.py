"""One prompt at a time: gammaray plain and speculative against transformers' `generate`, in one process.

    python benchmarks/generate.py [--dtype float32 bfloat16] [--max-tokens 100] [--repeats 3] [--out FOLDER]

Concurrency 1, temperature 0, the embedded model. Metric: decode throughput, the tokens after the first by the
time since it came, so prefill is left out of every arm. The arms take turns, so that a slow spell of the
machine slows all of them; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

from gammaray.engine.threads import asked_threads, compute_with, usable_cores

compute_with(asked_threads() or usable_cores())  # as the commands do, before torch is imported

import psutil
import torch
from transformers import AutoModelForCausalLM

from gammaray.engine.bench.prompts import PROMPTS as EVERY
from gammaray.engine.build import TokenizerDecoder, eos_ids
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.loading import load_runner, load_tokenizer, resolve
from gammaray.engine.local import run
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan

MODEL = "smollm2-135m-instruct"
PROMPTS = {name: EVERY[name] for name in ("edit", "code-rename", "summarise", "chat")}
SPECULATION = SpeculationPlan("ngram", gamma=8, width=1)


class Marks:
    """A transformers streamer that notes when the prompt (first) and each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Called after the last token; nothing to note."""


def measure(dtype: str, max_tokens: int, repeats: int) -> list[dict[str, object]]:
    tokenizer = load_tokenizer(MODEL)
    runner = load_runner(MODEL, dtype=dtype, num_blocks=256)
    engine = Engine(
        runner,
        TokenizerDecoder(tokenizer),
        eos_ids(runner, tokenizer),
        {"ngram": NgramDrafter()},
        EngineOptions(prefix_cache=False),
    )
    reference = AutoModelForCausalLM.from_pretrained(resolve(MODEL), dtype=getattr(torch, dtype)).eval()

    def transformers_arm(prompt: list[int]) -> tuple[list[int], float, float | None]:
        ids, marks = torch.tensor([prompt]), Marks()
        output = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            streamer=marks,
        )
        return output[0, len(prompt) :].tolist(), marks.times[-1] - marks.times[1], None

    def engine_arm(prompt: list[int], plan: SpeculationPlan) -> tuple[list[int], float, float | None]:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        done = run(engine, GenerateRequest("benchmark", tuple(prompt), sampling, plan))
        return list(done.ids), done.decode_s, done.stats.tau

    arms = {
        "transformers": transformers_arm,
        "plain": lambda prompt: engine_arm(prompt, PLAIN),
        "ngram": lambda prompt: engine_arm(prompt, SPECULATION),
    }
    rows = []
    for name, text in PROMPTS.items():
        message = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for arm in arms.values():
            arm(prompt)  # warm-up
        results = [{arm: call(prompt) for arm, call in arms.items()} for _ in range(repeats)]
        rate = {arm: median((len(r[arm][0]) - 1) / r[arm][1] for r in results) for arm in arms}
        rows.append(
            {
                "dtype": dtype,
                "prompt": name,
                "prompt_tokens": len(prompt),
                "tokens": len(results[0]["plain"][0]),
                "tok_s": {arm: round(value, 1) for arm, value in rate.items()},
                "plain_over_transformers": round(rate["plain"] / rate["transformers"], 2),
                "ngram_over_plain": round(rate["ngram"] / rate["plain"], 2),
                "tau": results[0]["ngram"][2],
                "ngram_equals_plain": results[0]["ngram"][0] == results[0]["plain"][0],
                "plain_equals_transformers": results[0]["plain"][0] == results[0]["transformers"][0],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def machine() -> dict[str, object]:
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "versions": {name: version(name) for name in ("torch", "transformers", "gammaray")},
    }


def table(report: dict[str, object], rows: list[dict[str, object]]) -> str:
    head = (
        "# Single stream: gammaray against transformers' `generate`\n\n"
        "Concurrency 1, temperature 0; decode tokens per second (the tokens after the first, by the time "
        "since it came); medians of interleaved repeats.\n"
        f"Machine: `{json.dumps(report['machine'])}`\nCommand: `{report['command']}`\n\n"
        "| dtype | prompt | tokens | transformers | gammaray plain | gammaray n-gram | plain / transformers "
        "| n-gram / plain | tau | n-gram = plain |\n|---|---|---|---|---|---|---|---|---|---|\n"
    )
    lines = []
    for row in rows:
        rate = row["tok_s"]
        assert isinstance(rate, dict)
        lines.append(
            f"| {row['dtype']} | {row['prompt']} | {row['tokens']} "
            f"| {rate['transformers']} | {rate['plain']} "
            f"| {rate['ngram']} | **{row['plain_over_transformers']}x** | **{row['ngram_over_plain']}x** | "
            f"{row['tau']:.2f} | {'yes' if row['ngram_equals_plain'] else 'no'} |"
        )
    return head + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    rows = [row for dtype in given.dtype for row in measure(dtype, given.max_tokens, given.repeats)]
    command = f"python benchmarks/generate.py --max-tokens {given.max_tokens} --repeats {given.repeats}"
    report: dict[str, object] = {"machine": machine(), "command": command}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "generate.json").write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")
    (given.out / "generate.md").write_text(table(report, rows))


if __name__ == "__main__":
    main()
