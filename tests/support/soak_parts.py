"""What the soak runs in Ray's processes: engines and draft workers of the product, over models that sleep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gammaray.actors.reach import reach
from gammaray.actors.served import Served
from gammaray.actors.target import Surroundings
from gammaray.config import Config
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.drafters.switch import TenantDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.service import AsyncEngine
from gammaray.engine.sim import Language, SimClock, SimDevice, StepCost
from gammaray.types import PLAIN, GenerateRequest

from .decoding import Outcome, run
from .draft_process import VOCAB, SleepClock, language
from .serving import ByteTokenizer
from .simlink import Dialect
from .tape import Letters

DRAFTER = "small"
VERIFY_S, LEVEL_S = 0.010, 0.001  # of a pass, whatever it feeds
NOISE = 0.15  # how far the draft model is from the target
BLOCKS = 96  # of 16 tokens; too few for everybody while one replica is away
MAX_BATCH = 16


def device(model: Language, pass_s: float, blocks: int, clock: SimClock) -> SimDevice:
    return SimDevice(model, clock, StepCost(((1_000_000, pass_s),)), blocks)


def engine(config: Config, around: Surroundings) -> AsyncEngine:
    """As `local_engine` makes it; every step checks the KV of a sequence."""
    pools = reach(around.pools, around.resolve)
    by_tenant = {tenant: make(VOCAB) for (tenant, _), make in pools.drafters.items()}
    made = Engine(
        device(language(), VERIFY_S, BLOCKS, SleepClock()),
        Letters(),
        drafters={DRAFTER: TenantDrafter(by_tenant, VOCAB)},
        options=EngineOptions(name=config.target.model, max_batch=MAX_BATCH, oracle=True),
    )
    return AsyncEngine(made, links=pools.links)


def link(config: Config, drafter: str) -> Served:
    """As `local_link` makes it."""
    small = device(Dialect(language(), NOISE), LEVEL_S, 4 * BLOCKS, SleepClock())
    return Served(drafter, ModelDrafter(small), VOCAB)


def tokenizer(model: str) -> ByteTokenizer:
    return ByteTokenizer()


def plainly(requests: Sequence[GenerateRequest]) -> dict[tuple[str, int], Outcome]:
    """What every sequence must say: the same requests without drafts, faults or time."""
    alone = Engine(device(language(), 0.0, 4096, SimClock()), Letters())
    return run(alone, [replace(request, plan=PLAIN) for request in requests])
