"""An HTTP request as the engine sees it: one GenerateRequest per prompt, all with one plan."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from gammaray.api.client import Planner
from gammaray.api.schema import GenerationBody, SpeculationField
from gammaray.types import GenerateRequest, ModelInfo, SamplingParams, SpeculationPlan

MASK = 2**64 - 1
TENANT = "default"


@dataclass(frozen=True, slots=True)
class Job:
    """`notes` says what was cut back to policy; choice k of prompt i has index i * n + k."""

    id: str
    created: int  # Unix seconds
    model: str
    n: int
    requests: tuple[GenerateRequest, ...]
    plan: SpeculationPlan
    notes: tuple[str, ...]


def build(
    prefix: str,
    body: GenerationBody,
    prompts: list[tuple[int, ...]],
    planner: Planner,
    info: ModelInfo,
    default_max_tokens: int | None,
) -> Job:
    """`default_max_tokens` None: what the model has room for. Raises InvalidRequest."""
    name = f"{prefix}-{secrets.token_hex(12)}"
    wish = body.speculation or SpeculationField()
    chosen, notes = planner(seeded=body.seed is not None, **wish.model_dump())
    requests = tuple(
        GenerateRequest(
            request_id=f"{name}-{index}",
            prompt=ids,
            sampling=_sampling(body, info.max_model_len - len(ids), default_max_tokens),
            plan=chosen,
            n=body.n or 1,
            tenant=TENANT,
        )
        for index, ids in enumerate(prompts)
    )
    return Job(name, int(time.time()), body.model, body.n or 1, requests, chosen, notes)


def _sampling(body: GenerationBody, room: int, default_max_tokens: int | None) -> SamplingParams:
    limit = body.token_limit or default_max_tokens or room
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=secrets.randbits(64) if body.seed is None else body.seed & MASK,
        max_tokens=min(limit, room),
        stop=tuple(body.stop),
        ignore_eos=body.ignore_eos,
    )
