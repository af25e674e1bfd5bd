"""What a request must satisfy before it may wait for its turn."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gammaray.errors import InvalidRequest
from gammaray.types import MAX_TREE_NODES, GenerateRequest, ModelInfo, SamplingParams, SpeculationPlan


def check_request(request: GenerateRequest, info: ModelInfo) -> None:
    """Raises InvalidRequest, naming the field, when this engine can never run the request."""
    prompt, max_tokens = request.prompt, request.sampling.max_tokens
    if not prompt:
        raise InvalidRequest("the prompt is empty: at least one token is needed", param="prompt")
    if not _in_vocabulary(prompt, info):
        raise InvalidRequest(f"prompt token ids must lie in 0..{info.vocab_size - 1}", param="prompt")
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, got {max_tokens}", param="max_tokens")
    if len(prompt) + max_tokens > info.max_model_len:
        raise InvalidRequest(
            f"{len(prompt)} prompt tokens and max_tokens {max_tokens} exceed the model's "
            f"{info.max_model_len} tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if request.n < 1:
        raise InvalidRequest(f"n must be at least 1, got {request.n}", param="n")
    _check_sampling(request.sampling)
    _check_tokens(request.sampling, info)
    _check_generated(request, info)
    _check_plan(request.plan, info)


def _check_sampling(sampling: SamplingParams) -> None:
    """Written so that NaN fails."""
    limits = {
        "temperature": 0 <= sampling.temperature < math.inf,
        "top_p": 0 < sampling.top_p <= 1,
        "min_p": 0 <= sampling.min_p <= 1,
        "top_k": sampling.top_k >= 0,
        "min_tokens": 0 <= sampling.min_tokens <= sampling.max_tokens,
        "repetition_penalty": 0 < sampling.repetition_penalty < math.inf,
        "presence_penalty": math.isfinite(sampling.presence_penalty),
        "frequency_penalty": math.isfinite(sampling.frequency_penalty),
        "logprobs": (sampling.logprobs or 0) >= 0,
        "prompt_logprobs": (sampling.prompt_logprobs or 0) >= 0,
    }
    for name, kept in limits.items():
        if not kept:
            raise InvalidRequest(f"{name} is out of range: {getattr(sampling, name)}", param=name)


def _check_tokens(sampling: SamplingParams, info: ModelInfo) -> None:
    tokens = {
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": tuple(token for token, _ in sampling.logit_bias),
        "bad_words": tuple(token for word in sampling.bad_words for token in word),
    }
    for name, ids in tokens.items():
        if not _in_vocabulary(ids, info):
            raise InvalidRequest(f"{name}: token ids must lie in 0..{info.vocab_size - 1}", param=name)
    if not all(math.isfinite(bias) for _, bias in sampling.logit_bias):
        raise InvalidRequest("logit_bias must be finite: -100 excludes a token", param="logit_bias")
    if not all(sampling.bad_words):
        raise InvalidRequest("a bad word must have at least one token", param="bad_words")
    if sampling.grammar is not None and sampling.ignore_eos:
        raise InvalidRequest("a grammar ends with EOS, which ignore_eos ignores", param="ignore_eos")


def _check_generated(request: GenerateRequest, info: ModelInfo) -> None:
    """A resumed stream: what the client has, for each of the n sequences."""
    if request.generated and len(request.generated) != request.n:
        raise InvalidRequest(
            f"{len(request.generated)} resumed sequences for n = {request.n}", param="generated"
        )
    if not all(_in_vocabulary(ids, info) for ids in request.generated):
        raise InvalidRequest(f"resumed token ids must lie in 0..{info.vocab_size - 1}", param="generated")
    if any(len(ids) > request.sampling.max_tokens for ids in request.generated):
        raise InvalidRequest("a resumed sequence is longer than max_tokens", param="generated")


def _in_vocabulary(ids: Sequence[int], info: ModelInfo) -> bool:
    return all(0 <= token < info.vocab_size for token in ids)


def _check_plan(plan: SpeculationPlan, info: ModelInfo) -> None:
    if plan.drafter is not None and plan.drafter not in info.drafters:
        raise InvalidRequest(
            f"no drafter {plan.drafter!r}; there are: {', '.join(info.drafters) or 'none'}",
            param="speculation.drafter",
        )
    if plan.gamma < 0 or plan.width < 1 or plan.gamma * plan.width > MAX_TREE_NODES:
        raise InvalidRequest(
            f"gamma x width must lie in 0..{MAX_TREE_NODES}, got {plan.gamma} x {plan.width}",
            param="speculation.gamma",
        )
