"""What has been generated for one HTTP request: texts, usage and speculation counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gammaray.api.job import Job
from gammaray.types import NO_STATS, SpeculationStats, TokenChunk


@dataclass(slots=True)
class Choice:
    """One sequence so far."""

    text: list[str] = field(default_factory=list)
    tokens: int = 0
    finish: str | None = None
    stats: SpeculationStats = NO_STATS
    cached: int = 0  # prompt tokens

    def add(self, chunk: TokenChunk) -> None:
        self.text.append(chunk.text)
        self.tokens += len(chunk.ids)
        if chunk.finish is not None:
            self.finish, self.cached = chunk.finish, chunk.cached_tokens
            self.stats = chunk.stats or self.stats


class Answer:
    """Sums the chunks of all choices of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.choices = [Choice() for _ in range(job.n * len(job.requests))]

    def add(self, index: int, chunk: TokenChunk) -> None:
        self.choices[index].add(chunk)

    @property
    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage. A prompt counts once, however many choices share it."""
        prompt = sum(len(request.prompt) for request in self.job.requests)
        completion = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached()},
        }

    def _cached(self) -> int:
        """The first choice of each prompt tells: later ones may find what the first one computed."""
        return sum(choice.cached for choice in self.choices[:: self.job.n])

    def metrics(self) -> dict[str, Any]:
        """The `metrics` extension: counts of all choices together, and the plan they ran under."""
        plan, stats = self.job.plan, sum((choice.stats for choice in self.choices), NO_STATS)
        speculation = {
            "state": "off" if plan.drafter is None else "on",
            "drafter": plan.drafter,
            "gamma": plan.gamma,
            "width": plan.width,
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "tau": stats.tau,
            "alpha": stats.alpha,
            "histogram": list(stats.lengths),  # [k]: rounds that emitted k tokens
            "notes": list(self.job.notes),
        }
        return {"speculative_decoding": speculation}
