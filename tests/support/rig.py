"""An engine on a simulated device, whose drafts come from draft workers on devices of their own."""

from __future__ import annotations

from dataclasses import replace

from gammaray.actors.link.client import LIMITS, Limits
from gammaray.engine.drafters.base import Drafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.sim import Language, SimClock, SimDevice, StepCost
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan

from .decoding import Driver
from .simlink import Dialect, SimWorker, draft_worker, remote
from .tape import Letters

VERIFY_S, LEVEL_S = 0.010, 0.002
LANGUAGE = Language(vocab_size=24, max_model_len=2048)
CLOSE = Dialect(LANGUAGE, 0.15)
GAMMA = 4


class SimEngine:
    """An engine whose every pass takes VERIFY_S, with the state oracle on."""

    def __init__(self, clock: SimClock, drafter: Drafter, blocks: int = 4096) -> None:
        self.clock = clock
        self.engine = Engine(
            SimDevice(LANGUAGE, clock, StepCost(((100_000, VERIFY_S),)), blocks),
            Letters(),
            drafters={"small": drafter},
            options=EngineOptions(max_batch=32, token_budget=512, oracle=True),
            clock=clock,
        )
        self.driver = Driver(self.engine)

    def step(self) -> float:
        """Seconds that it took."""
        began = self.clock()
        self.driver.step()
        return self.clock() - began

    def finish(self) -> None:
        while not self.engine.idle:
            self.step()

    def texts(self) -> dict[tuple[str, int], list[int]]:
        return {key: outcome.ids for key, outcome in self.driver.outcomes.items()}


class Rig(SimEngine):
    """... and with one draft worker."""

    def __init__(
        self, worker: SimWorker, overlap: bool = True, limits: Limits = LIMITS, blocks: int = 4096
    ) -> None:
        self.worker = worker
        if not overlap:
            worker.server.wants_time = lambda: False  # type: ignore[method-assign]
        clock = SimClock()
        self.drafter = remote(worker, clock, limits)
        super().__init__(clock, self.drafter, blocks)


def requests(
    count: int = 3, tokens: int = 60, temperature: float = 0.0, width: int = 1, verification: str = "coupled"
) -> list[GenerateRequest]:
    plan = SpeculationPlan("small", GAMMA, width, verification)  # type: ignore[arg-type]
    return [
        GenerateRequest(
            f"r{i}",
            tuple(range(i, i + 6)),
            SamplingParams(temperature=temperature, seed=i, max_tokens=tokens, ignore_eos=True),
            plan,
        )
        for i in range(count)
    ]


def plainly(batch: list[GenerateRequest]) -> dict[tuple[str, int], list[int]]:
    rig = Rig(draft_worker(CLOSE, LEVEL_S))
    rig.driver.submit(replace(request, plan=PLAIN) for request in batch)
    rig.finish()
    return rig.texts()
