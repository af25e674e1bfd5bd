"""What a request must satisfy before it may wait for its turn."""

from __future__ import annotations

from gammaray.engine.depth import NODE_LIMIT
from gammaray.errors import InvalidRequest
from gammaray.types import GenerateRequest, ModelInfo, SpeculationPlan


def check_request(request: GenerateRequest, info: ModelInfo) -> None:
    """Raises InvalidRequest, naming the field, when this engine can never run the request."""
    prompt, max_tokens = request.prompt, request.sampling.max_tokens
    if not prompt:
        raise InvalidRequest("the prompt is empty: at least one token is needed", param="prompt")
    if not all(0 <= token < info.vocab_size for token in prompt):
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
    _check_generated(request)
    _check_plan(request.plan, info)


def _check_generated(request: GenerateRequest) -> None:
    """A resumed stream: one sequence of ids for each of n, each with tokens still to come."""
    if not request.generated:
        return
    if len(request.generated) != request.n:
        raise InvalidRequest(
            f"{len(request.generated)} resumed sequences for n = {request.n}", param="generated"
        )
    if any(len(ids) >= request.sampling.max_tokens for ids in request.generated):
        raise InvalidRequest("a resumed sequence has all its tokens already", param="generated")


def _check_plan(plan: SpeculationPlan, info: ModelInfo) -> None:
    if plan.drafter is not None and plan.drafter not in info.drafters:
        raise InvalidRequest(
            f"no drafter {plan.drafter!r}; there are: {', '.join(info.drafters) or 'none'}",
            param="speculation.drafter",
        )
    if plan.gamma < 0 or plan.width < 1 or plan.gamma * plan.width > NODE_LIMIT:
        raise InvalidRequest(
            f"gamma x width must lie in 0..{NODE_LIMIT}, got {plan.gamma} x {plan.width}",
            param="speculation.gamma",
        )
