"""What runs in Ray's processes for tests of monitoring: a simulated model, a good drafter and a poor one."""

from __future__ import annotations

from gammaray.actors.target import Surroundings
from gammaray.config import Config
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.service import AsyncEngine
from gammaray.engine.sim import Language, SimDevice, StepCost
from gammaray.engine.sim_drafter import OracleDrafter, constant

from .draft_process import SleepClock
from .serving import ByteTokenizer
from .tape import Letters

GOOD, POOR = "good", "poor"
ACCEPTANCE = {GOOD: 0.8, POOR: 0.1}
COST, LEVEL_S = StepCost(((64, 0.004), (4096, 0.020))), 0.0002


def engine(config: Config, around: Surroundings) -> AsyncEngine:
    """As `local_engine` makes it, on a device whose steps take time."""
    language, clock = Language(256, 1024), SleepClock()
    drafters = {
        name: OracleDrafter(language, clock, constant(alpha), LEVEL_S) for name, alpha in ACCEPTANCE.items()
    }
    options = EngineOptions(name=config.target.model, max_batch=8)
    device = SimDevice(language, clock, COST, num_blocks=512)
    return AsyncEngine(Engine(device, Letters(), (), drafters, options, profile=COST), around.listener)


def tokenizer(model: str) -> ByteTokenizer:
    return ByteTokenizer()
