"""A finished sequence of which a test only names what matters to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gammaray.types import Finished, SpeculationStats

ORDINARY = Finished(
    tenant="chat",
    request_class="default",
    drafter="lookup",
    state="on",
    shadow=False,
    reason="length",
    fallback=None,
    index=0,
    prompt_tokens=200,
    cached_tokens=0,
    output_tokens=61,
    stats=SpeculationStats(rounds=20, emitted=60, tested=80, first_accepted=48, first_hits=48, tries=(80,)),
    queued_s=0.01,
    first_s=0.11,
    total_s=0.71,
)


def finished(**changes: Any) -> Finished:
    return replace(ORDINARY, **changes)
