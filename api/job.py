"""An HTTP request as the engine sees it: one GenerateRequest per prompt, all with one plan."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gammaray.api.prompt import Inputs, check_ids
from gammaray.api.schema import ChatBody, CompletionBody, GenerationBody
from gammaray.errors import InvalidRequest
from gammaray.types import (
    NO_FORECAST,
    Asked,
    GenerateRequest,
    ModelInfo,
    Planned,
    SamplingParams,
    SpeculationPlan,
    Wish,
)

MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Terms:
    """What the server grants a request; `notes` says what it was refused."""

    tenant: str
    default_tokens: int | None  # without `max_tokens`; None: what the model has room for
    most_tokens: int | None  # None: no limit
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """`notes` says what was cut back to policy; choice k of prompt i has index i * n + k."""

    id: str
    created: int  # Unix seconds
    model: str
    n: int
    inputs: Inputs
    requests: tuple[GenerateRequest, ...]
    plan: SpeculationPlan
    notes: tuple[str, ...]
    has_logprobs: bool = False
    prompt_only: bool = False  # max_tokens 0: the answer is the echo


def ask(body: ChatBody | CompletionBody, inputs: Inputs, tenant: str, headers: Mapping[str, str]) -> Asked:
    """What a planner is told of a request, under a fresh id. `headers`: names in lower case."""
    is_chat = isinstance(body, ChatBody)
    longest = max(range(len(inputs.prompts)), key=lambda index: len(inputs.prompts[index]))
    return Asked(
        f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
        tenant,
        "chat" if is_chat else "completions",
        inputs.prompts[longest],
        _text(body, longest),
        headers,
        _temperature(body),
        body.seed is not None,
        Wish(**body.speculation.model_dump()) if body.speculation else Wish(),
    )


def _text(body: ChatBody | CompletionBody, index: int) -> str | None:
    """Of a conversation, or of one prompt unless that came as token ids."""
    if isinstance(body, ChatBody):
        return "\n\n".join(message.content for message in body.messages)
    prompt = body.prompt[index]
    return prompt if isinstance(prompt, str) else None


def build(
    body: GenerationBody,
    inputs: Inputs,
    asked: Asked,
    planned: Planned,
    info: ModelInfo,
    terms: Terms,
    trace: str | None = None,
) -> Job:
    """The engine's part of a request. Raises InvalidRequest, also for more tokens than `terms` grants.

    `trace`: the traceparent of what its spans hang on.
    """
    _check_places(body, inputs, info)
    name, chosen = asked.request_id, planned.plan
    default, capped = _granted(body, terms)
    requests = tuple(
        GenerateRequest(
            request_id=f"{name}-{index}",
            prompt=ids,
            sampling=_sampling(body, inputs, info, info.max_model_len - len(ids), default),
            plan=chosen,
            n=body.n or 1,
            tenant=terms.tenant,
            request_class=planned.request_class,
            priority=body.priority or 0,
            forecast=planned.forecast if ids is asked.prompt else NO_FORECAST,
            trace=trace,
        )
        for index, ids in enumerate(inputs.prompts)
    )
    notes = (*terms.notes, *planned.notes, *capped)
    return Job(
        name,
        int(time.time()),
        body.model,
        body.n or 1,
        inputs,
        requests,
        chosen,
        notes,
        body.top is not None,
        body.token_limit == 0,
    )


def _check_places(body: GenerationBody, inputs: Inputs, info: ModelInfo) -> None:
    choices = len(inputs.prompts) * (body.n or 1)
    if choices > info.places:
        message = f"{choices} choices are more than this server runs at once ({info.places})"
        raise InvalidRequest(message, param="n" if len(inputs.prompts) == 1 else "prompt")


def _granted(body: GenerationBody, terms: Terms) -> tuple[int | None, tuple[str, ...]]:
    """The default of `max_tokens` under the tenant's limit, and a note when the limit decides it."""
    default, most, asked = terms.default_tokens, terms.most_tokens, body.token_limit
    if most is None:
        return default, ()
    if asked is not None and asked > most:
        param = "max_completion_tokens" if body.max_tokens is None else "max_tokens"
        message = f"{param} {asked} exceeds {most}, the limit of this tenant"
        raise InvalidRequest(message, param=param, code="max_tokens")
    if asked is None and (default is None or default > most):
        return most, (f"max_tokens was set to {most}, the limit of this tenant",)
    return default, ()


def _sampling(
    body: GenerationBody, inputs: Inputs, info: ModelInfo, room: int, default_max_tokens: int | None
) -> SamplingParams:
    check_ids(body.stop_token_ids, "stop_token_ids", info)
    check_ids([token for token, _ in body.logit_bias], "logit_bias", info)
    return SamplingParams(
        temperature=_temperature(body),
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=secrets.randbits(64) if body.seed is None else body.seed & MASK,
        **_length(body, room, default_max_tokens),
        stop=tuple(body.stop),
        ignore_eos=body.ignore_eos,
        stop_token_ids=tuple(body.stop_token_ids),
        bad_words=inputs.bad_words,
        logit_bias=tuple(body.logit_bias),
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        grammar=body.grammar,
        logprobs=body.top,
        prompt_logprobs=body.top if body.echoes else None,
    )


def _temperature(body: GenerationBody) -> float:
    return 1.0 if body.temperature is None else body.temperature


def _length(body: GenerationBody, room: int, default_max_tokens: int | None) -> dict[str, int]:
    """The engine has no run of 0 tokens: the answer to one leaves its only token out."""
    asked = default_max_tokens if body.token_limit is None else body.token_limit
    most, least = room if asked is None else min(max(asked, 1), room), body.min_tokens or 0
    if least > most:
        message = f"min_tokens {least} exceeds the {most} tokens that this answer may have"
        raise InvalidRequest(message, param="min_tokens", code="invalid_value")
    return {"max_tokens": most, "min_tokens": least}
