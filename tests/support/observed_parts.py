"""What runs in Ray's processes for tests of monitoring: a simulated model, a good drafter and a poor one."""

from __future__ import annotations

import time

from gammaray.actors.target import Surroundings
from gammaray.config import Config
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.service import AsyncEngine
from gammaray.engine.sim import Language, SimClock, SimDevice, StepCost
from gammaray.engine.sim_drafter import OracleDrafter, constant

from .serving import ByteTokenizer
from .tape import Letters

GOOD, POOR = "good", "poor"
ACCEPTANCE = {GOOD: 0.8, POOR: 0.1}
COST, LEVEL_S = StepCost(((64, 0.004), (4096, 0.020))), 0.0002


class ExactClock(SimClock):
    """Seconds that really pass, and no others: a busy machine changes nothing of what anything costs."""

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        time.sleep(seconds)

    def advance_to(self, time: float) -> None:
        self.advance(max(0.0, time - self()))


def engine(config: Config, around: Surroundings) -> AsyncEngine:
    """As `local_engine` makes it, on a device whose steps take time."""
    language, clock = Language(256, 1024), ExactClock()
    drafters = {
        name: OracleDrafter(language, clock, constant(alpha), LEVEL_S) for name, alpha in ACCEPTANCE.items()
    }
    options = EngineOptions(name=config.target.model, max_batch=8)
    device = SimDevice(language, clock, COST, num_blocks=512)
    one = Engine(device, Letters(), (), drafters, options, clock=clock, profile=COST)
    return AsyncEngine(one, around.listener)


def tokenizer(model: str) -> ByteTokenizer:
    return ByteTokenizer()
