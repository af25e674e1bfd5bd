"""After how many of its own layers the target drafts best (layer exit, LayerSkip, arXiv 2404.16710).

At temperature 0 the target's answers tell all: a draft that is right so far leaves the very KV that the
target has there, so whether the next level is right is whether the exit's best token is the answer's. One
dense pass an exit gives alpha, and tau for every depth, without drafting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from gammaray import drafter_names
from gammaray.engine import loading
from gammaray.engine.batch import Row
from gammaray.engine.bench.measure import encode
from gammaray.engine.build import TokenizerDecoder, eos_ids, load_target
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.local import run
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError, InvalidRequest
from gammaray.training.evaluate import GREEDY, held_out
from gammaray.types import GenerateRequest, SamplingParams

DEEPEST = 8  # levels of a draft
REPEATS = 5
NEAR = 0.02  # of the peak's speed-up: within it the earlier layer is taken, which is surer with other prompts
Answer = tuple[tuple[int, ...], tuple[int, ...]]  # a prompt, and what the target said


@dataclass(frozen=True, slots=True)
class Wanted:
    target: str
    data: Path | None = None
    limit: int = 26
    layers: tuple[int, ...] = ()  # to look at; none: all of them
    sampling: SamplingParams = GREEDY
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Exit:
    """`gamma`: the depth that pays best, with its tau. `latency`: of a plain token. `speedup`: predicted."""

    layers: int
    alpha: float
    latency: float
    gamma: int
    tau: float
    speedup: float


def search(wanted: Wanted, note: Callable[[Exit], None] = lambda one: None) -> list[Exit]:
    """Ascending; `note` gets each as it is done. Raises ConfigError."""
    if not wanted.sampling.greedy:
        raise ConfigError("a search over layers needs temperature 0")
    runner = load_target(drafter_names.alone({"model": wanted.target}, wanted.dtype, {}))
    parts = [(layers, runner.first(layers)) for layers in wanted.layers or range(1, runner.num_layers)]
    if not parts:
        raise ConfigError(f"{wanted.target} has one layer, so there is nothing to exit from")
    answers = _answers(runner, wanted)
    sizes = range(1, DEEPEST + 2)
    passes = [partial(_feed, part, 1) for _, part in parts] + [partial(_feed, runner, n) for n in sizes]
    seconds = in_turns(passes)
    steps = dict(zip(sizes, seconds[len(parts) :], strict=True))
    found = []
    for (layers, part), draft_s in zip(parts, seconds, strict=False):
        right = [hits(part, *answer) for answer in answers]
        found.append(best_depth(layers, right, draft_s, steps.__getitem__))
        note(found[-1])
    return sorted(found, key=lambda one: one.layers)


def _feed(runner: ModelRunner, tokens: int) -> None:
    """One pass over a sequence's next tokens; the KV that it writes is nobody's."""
    blocks = range(-(-(tokens + 1) // runner.block_size))
    runner.forward([Row(range(1, tokens + 1), 1, blocks)])
    runner.wait()


def in_turns(
    passes: Sequence[Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of each, the fastest of several. They take turns, so that a slow spell of the machine, which
    lasts, does not make one of them look slow beside the others."""
    rounds = []
    for _ in range(REPEATS + 1):
        edges = [clock()]
        for one in passes:
            one()
            edges.append(clock())
        rounds.append([b - a for a, b in pairwise(edges)])
    return [min(times) for times in zip(*rounds[1:], strict=True)]  # the first round also warms up


def _answers(runner: ModelRunner, wanted: Wanted) -> list[Answer]:
    """Raises ConfigError where there is none to learn from."""
    tokenizer = loading.load_tokenizer(wanted.target)
    options = EngineOptions(name=wanted.target, max_batch=1, prefix_cache=False)
    engine = Engine(runner, TokenizerDecoder(tokenizer), eos_ids(runner, tokenizer), options=options)
    found, reason = [], "there are no prompts"
    for number, prompt in enumerate(held_out(wanted.data, wanted.limit)):
        try:
            ids = encode(tokenizer, prompt)
            answer = run(engine, GenerateRequest(str(number), ids, wanted.sampling)).ids
        except InvalidRequest as error:
            reason = error.message
            continue
        found += [(ids, answer)] if len(answer) > 1 else []
        reason = "answers have one token"
    if not found:
        raise ConfigError(f"nothing to judge exits by: {reason}")
    return found


@torch.inference_mode()
def hits(part: ModelRunner, prompt: Sequence[int], answer: Sequence[int]) -> list[bool]:
    """Whether the exit has each token of the answer, but the first, for the likeliest: [len(answer) - 1]."""
    logits, _ = part.dense([*prompt, *answer[:-1]])  # [T, V]
    best = logits[len(prompt) :].argmax(-1).tolist()
    return [a == b for a, b in zip(best, answer[1:], strict=True)]


def rounds(right: Sequence[bool], gamma: int) -> list[int]:
    """Tokens that each round emits: what of its draft is right, and the one behind it."""
    emitted, at = [], 0
    while at < len(right):
        window = right[at : at + gamma]
        accepted = window.index(False) if False in window else len(window)
        emitted.append(min(accepted + 1, len(right) - at))
        at += emitted[-1]
    return emitted


def best_depth(
    layers: int, right: Sequence[Sequence[bool]], draft_s: float, step_s: Callable[[int], float]
) -> Exit:
    """S = tau / (v + gamma c) (math.md section 2) of the depth that makes it largest.

    `right`: of each answer; `draft_s`: seconds of a drafted token, `step_s`: of a step over so many tokens.
    """
    plain_s = step_s(1)

    def exit_of(gamma: int) -> Exit:
        emitted = [tokens for one in right for tokens in rounds(one, gamma)]
        tau = sum(emitted) / len(emitted)
        speedup = tau * plain_s / (step_s(gamma + 1) + gamma * draft_s)
        return Exit(layers, alpha, draft_s / plain_s, gamma, tau, speedup)

    alpha = sum(map(sum, right)) / sum(map(len, right))
    return max(map(exit_of, range(1, DEEPEST + 1)), key=lambda one: one.speedup)


def pick(exits: Sequence[Exit], near: float = NEAR) -> Exit:
    """The earliest whose speed-up is within `near` of the peak's."""
    peak = max(one.speedup for one in exits)
    return next(one for one in exits if one.speedup >= peak - near)
