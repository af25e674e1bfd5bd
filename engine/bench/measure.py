"""Every arm on every prompt, in turns on one engine, so that a slow spell of the machine slows all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gammaray.drafter_names import Arm
from gammaray.engine.bench.dataset import Prompt
from gammaray.engine.bench.prompts import WARM_UP
from gammaray.engine.engine import Engine
from gammaray.engine.local import Run, chat_ids, run
from gammaray.errors import EngineFailure, InvalidRequest
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WARM_UP_TOKENS = 8
PLAIN_LABEL = "plain"
Runner = Callable[[Engine, GenerateRequest], Run]


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt in all arms."""

    prompt: Prompt
    plain: Run
    runs: Mapping[str, Run]  # by the arm's label


@dataclass(frozen=True, slots=True)
class Skipped:
    prompt: str
    reason: str
    failed: bool  # in the engine; else the prompt does not fit


def measure(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    adaptive: bool,
    run: Runner = run,
) -> Iterator[Measured | Skipped]:
    """One result a prompt, as it comes, after a warm-up of each arm on a prompt of its own.

    Without `adaptive` drafts are verified whole, and to the end of each text, so that acceptance is the
    drafter's own.
    """
    plans = {PLAIN_LABEL: PLAIN} | {
        arm.label: SpeculationPlan(arm.drafter, arm.gamma, arm.width, adaptive=adaptive, breaks=adaptive)
        for arm in arms
    }
    warm = GenerateRequest("warm-up", tuple(tokenizer(WARM_UP)["input_ids"]), sampling)
    for plan in plans.values():
        run(engine, replace(warm, plan=plan, sampling=replace(sampling, max_tokens=WARM_UP_TOKENS)))
    for number, prompt in enumerate(prompts):
        turn = number % len(plans)  # who begins changes
        order = [*plans][turn:] + [*plans][:turn]
        try:
            ids = encode(tokenizer, prompt)
            requests = {
                label: GenerateRequest(f"{number} {label}", ids, sampling, plans[label]) for label in order
            }
            runs = {label: run(engine, request) for label, request in requests.items()}
        except (InvalidRequest, EngineFailure) as error:
            yield Skipped(prompt.name, error.message, isinstance(error, EngineFailure))
        else:
            yield Measured(prompt, runs.pop(PLAIN_LABEL), runs)


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Token ids. Raises InvalidRequest for a conversation that the model's template refuses."""
    if isinstance(prompt.ask, str):
        return tuple(tokenizer(prompt.ask)["input_ids"])
    if not tokenizer.chat_template:
        return tuple(tokenizer("\n".join(message["content"] for message in prompt.ask))["input_ids"])
    try:
        return chat_ids(tokenizer, prompt.ask)
    except Exception as error:  # a template raises what it likes
        raise InvalidRequest(f"the chat template refuses it: {error}") from None
