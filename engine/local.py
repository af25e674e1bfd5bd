"""One prompt at a time on an engine in this process: what `gammaray generate` does.

Figures are for concurrency 1. tok_s is decode throughput: tokens after the first, by the time since it came.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from gammaray.config import Config
from gammaray.engine.build import build_engine
from gammaray.engine.engine import Engine
from gammaray.engine.loading import load_tokenizer
from gammaray.errors import EngineFailure
from gammaray.types import (
    PLAIN,
    GenerateRequest,
    SamplingParams,
    SpeculationPlan,
    SpeculationStats,
    StepReport,
    TokenChunk,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Run:
    ids: tuple[int, ...]
    text: str
    ttft_s: float
    decode_s: float
    stats: SpeculationStats

    @property
    def tok_s(self) -> float | None:
        """None when there was no second token to time, or it came with the first."""
        return (len(self.ids) - 1) / self.decode_s if self.decode_s else None

    def to_json(self) -> dict[str, object]:
        return {
            "text": self.text,
            "tokens": len(self.ids),
            "tok_s": self.tok_s,
            "ttft_s": self.ttft_s,
            "tau": self.stats.tau,
            "alpha": self.stats.acceptance,
            "rounds": self.stats.rounds,
        }

    def describe(self) -> str:
        rate, tau = _figure(self.tok_s, "{:.1f} tok/s"), _figure(self.stats.tau, "tau {:.2f}")
        return f"[{len(self.ids)} tokens, first after {self.ttft_s:.2f} s, then {rate}, {tau}]"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same request plainly and speculatively; times are medians over interleaved repeats."""

    plain: Run
    speculative: Run
    plain_tok_s: float | None
    speculative_tok_s: float | None

    @property
    def first_difference(self) -> int | None:
        """Index of the first generated token that differs; None when all are equal."""
        ours, theirs = self.plain.ids, self.speculative.ids
        if ours == theirs:
            return None
        pairs = enumerate(zip(ours, theirs, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))

    @property
    def speedup(self) -> float | None:
        if self.plain_tok_s is None or self.speculative_tok_s is None:
            return None
        return self.speculative_tok_s / self.plain_tok_s

    def describe(self, dtype: str) -> str:
        """For people."""
        stats = self.speculative.stats
        same = self.first_difference is None
        verdict = "the same tokens" if same else f"tokens differ from number {self.first_difference} on"
        if not same and dtype != "float32":
            verdict += (
                f" ({dtype} rounds differently with the batch shape, so near-ties may flip; try float32)"
            )
        return (
            f"{self.speculative.text}\n\n"
            f"plain        {_figure(self.plain_tok_s, '{:6.1f} tok/s')}\n"
            f"speculative  {_figure(self.speculative_tok_s, '{:6.1f} tok/s')}   "
            f"{_figure(stats.tau, 'tau {:.2f}')}   {_figure(stats.acceptance, 'alpha {:.2f}')}   "
            f"{stats.rounds} rounds for {len(self.speculative.ids)} tokens\n"
            f"speed-up     {_figure(self.speedup, '{:6.2f}x')} at concurrency 1, {dtype}: {verdict}"
        )

    def to_json(self) -> dict[str, object]:
        """The shape that scripts rely on (docs: commands)."""
        stats = self.speculative.stats
        return {
            "plain": {"tokens": len(self.plain.ids), "tok_s": self.plain_tok_s},
            "speculative": {
                "tokens": len(self.speculative.ids),
                "tok_s": self.speculative_tok_s,
                "tau": stats.tau,
                "alpha": stats.acceptance,
                "rounds": stats.rounds,
            },
            "equal": self.first_difference is None,
            "first_difference": self.first_difference,
            "speedup": self.speedup,
        }


def command(
    config: Config,
    prompt: str,
    plan: SpeculationPlan,
    sampling: SamplingParams,
    raw: bool,
    repeats: int,  # of a comparison; 0: only generate
    as_json: bool,
) -> int:
    """`gammaray generate`. Prints, and returns the exit code: 1 when speculation changed a float32 output."""
    engine = build_engine(config)
    ids = encode(config.target.model, prompt, raw)
    request = GenerateRequest("generate", ids, sampling, plan)
    if repeats:
        comparison = compare(engine, request, plan, repeats)
        print(json.dumps(comparison.to_json()) if as_json else comparison.describe(engine.info.dtype))
        return int(comparison.first_difference is not None and engine.info.dtype == "float32")
    if as_json:
        print(json.dumps(run(engine, request).to_json()))
        return 0
    done = run(engine, request, show=lambda text: print(text, end="", flush=True))
    print(f"\n\n{done.describe()}", file=sys.stderr)
    return 0


def encode(model: str, prompt: str, raw: bool) -> tuple[int, ...]:
    """Token ids of a user's prompt, in the model's chat template when it has one. Raises InvalidRequest."""
    tokenizer = load_tokenizer(model)
    if raw or not tokenizer.chat_template:
        return tuple(tokenizer(prompt)["input_ids"])
    return chat_ids(tokenizer, [{"role": "user", "content": prompt}])


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
    """Of a conversation in the model's template, up to where its answer begins."""
    plain = [dict(message) for message in messages]
    text = str(tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False))
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def stream(
    engine: Engine, request: GenerateRequest, watch: Callable[[StepReport], None] = lambda report: None
) -> Iterator[TokenChunk]:
    """Chunks of one request; `watch` gets what each step reports. Raises InvalidRequest, EngineFailure."""
    engine.submit(request)
    try:
        while not engine.idle:
            done = engine.step()
            watch(done.report)
            yield from done.chunks
    finally:
        if not engine.idle:  # the reader left, or a step failed
            engine.fail_all("stopped")


def run(
    engine: Engine,
    request: GenerateRequest,
    show: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.perf_counter,
    watch: Callable[[StepReport], None] = lambda report: None,
) -> Run:
    """Run one request to its end and time it; `show` gets the text as it comes, `watch` as in `stream`."""
    ids: list[int] = []
    text: list[str] = []
    begin = clock()
    first = last = begin
    stats = SpeculationStats()
    for chunk in stream(engine, request, watch):
        last = clock()
        if not ids:
            first = last
        ids += chunk.ids
        text.append(chunk.text)
        show(chunk.text)
        stats = chunk.stats or stats
        if chunk.finish == "error":
            raise EngineFailure(chunk.error or "the engine failed this request")
    return Run(tuple(ids), "".join(text), first - begin, last - first, stats)


def compare(engine: Engine, request: GenerateRequest, plan: SpeculationPlan, repeats: int = 3) -> Comparison:
    """Plain and speculative in turn, after a warm-up of both. The engine should not keep a prefix cache:
    the second run would find the first one's prompt."""
    short = replace(request, sampling=replace(request.sampling, max_tokens=WARM_UP_TOKENS))
    for warm in (PLAIN, plan):
        run(engine, replace(short, plan=warm))
    pairs = [
        (run(engine, replace(request, plan=PLAIN)), run(engine, replace(request, plan=plan)))
        for _ in range(repeats)
    ]
    return Comparison(
        plain=pairs[0][0],
        speculative=pairs[0][1],
        plain_tok_s=_median(plain.tok_s for plain, _ in pairs),
        speculative_tok_s=_median(speculative.tok_s for _, speculative in pairs),
    )


def _figure(value: float | None, form: str) -> str:
    return form.format(value) if value is not None else "(nothing to measure)"


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
