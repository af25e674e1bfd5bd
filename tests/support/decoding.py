"""Running engines in tests, and what a plain decode gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gammaray.engine.engine import Engine
from gammaray.types import FinishReason, GenerateRequest, SpeculationStats, StepReport, TokenChunk


@dataclass
class Outcome:
    """All chunks of one sequence, joined; joining checks that they neither overlap nor leave a gap."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    stats: SpeculationStats | None = None

    def add(self, chunk: TokenChunk) -> None:
        assert self.finish is None, "a chunk after the last one"
        assert chunk.first_position == len(self.ids), "a gap or an overlap"
        self.ids += chunk.ids
        self.text += chunk.text
        self.finish, self.stats = chunk.finish, chunk.stats


class Driver:
    """Steps an engine and collects what it delivers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        self.reports: list[StepReport] = []

    def submit(self, requests: Iterable[GenerateRequest]) -> None:
        for request in requests:
            self.engine.submit(request)

    def step(self) -> None:
        output = self.engine.step()
        self.reports.append(output.report)
        for chunk in output.chunks:
            self.outcomes.setdefault((chunk.request_id, chunk.sequence), Outcome()).add(chunk)

    def finish(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if self.engine.idle:
                return
            self.step()
        raise AssertionError(f"not finished after {limit} steps")


def run(engine: Engine, requests: Sequence[GenerateRequest]) -> dict[tuple[str, int], Outcome]:
    driver = Driver(engine)
    driver.submit(requests)
    driver.finish()
    return driver.outcomes
