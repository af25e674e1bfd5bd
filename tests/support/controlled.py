"""An engine of a few lines that tells what it does, and writes down which policies it gets."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from gammaray.actors.target import Surroundings
from gammaray.config import Config
from gammaray.types import (
    Finished,
    GenerateRequest,
    KeyCounts,
    PolicySnapshot,
    SpeculationStats,
    StepReport,
    TokenChunk,
)
from support.serving import SlowEngine


class ReportingEngine(SlowEngine):
    """Each word is a step. A request with the seed 666 falls back, if it was to speculate."""

    def __init__(self, log: Path, listener: Callable[[StepReport], None]) -> None:
        super().__init__(log)
        self._listener = listener

    def apply(self, policy: PolicySnapshot) -> None:
        stopped = sorted({key[0] for key, one in policy.keys.items() if one.stops})
        self._write(f"policy {policy.version} {policy.speculation} {','.join(stopped)}")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        words = 0
        async for chunk in super().generate(request):
            words += 1
            ended = (self._ended(request, words),) if chunk.finish else ()
            self._listener(_step(request, ended))
            yield chunk

    def _ended(self, request: GenerateRequest, words: int) -> Finished:
        falls = request.sampling.seed == 666 and request.plan.drafter is not None
        return Finished(
            tenant=request.tenant,
            request_class=request.request_class,
            index=0,
            drafter=request.plan.drafter,
            state=request.plan.state,
            shadow=request.plan.shadow,
            reason="length",
            fallback="low_acceptance" if falls else None,
            prompt_tokens=len(request.prompt),
            cached_tokens=0,
            output_tokens=words,
            stats=SpeculationStats(rounds=words, emitted=words),
            total_s=0.02 * words,
        )


def _step(request: GenerateRequest, finished: tuple[Finished, ...]) -> StepReport:
    stats = SpeculationStats(rounds=1, emitted=1)
    counts = (KeyCounts(request.tenant, request.request_class, request.plan.drafter, 1, stats),)
    return StepReport(0, 1, 0, 0, 0, 1, 9, 0, 0, 0, 0.0, 0.02, 0.0, 0.0, counts, finished)


def factory(log: Path) -> Callable[[Config, Surroundings], ReportingEngine]:
    return lambda config, around: ReportingEngine(log, around.listener)
