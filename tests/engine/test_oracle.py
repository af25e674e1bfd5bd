"""The state oracle sees each kind of spoilt state and names where it begins."""

from __future__ import annotations

import pytest
from support.decoding import Driver
from support.tape import Letters, TapeRunner

from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.errors import StateMismatch
from gammaray.types import GenerateRequest, SamplingParams, SpeculationPlan


@pytest.fixture
def driver() -> Driver:
    """An engine in the middle of a request that speculates."""
    engine = Engine(
        TapeRunner(),
        Letters(),
        drafters={"model": ModelDrafter(TapeRunner(noise=0.2))},
        options=EngineOptions(oracle=True),
    )
    running = Driver(engine)
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    running.submit([GenerateRequest("r", (1, 2, 3, 4, 5, 6), sampling, SpeculationPlan("model", 3, 2))])
    for _ in range(3):
        running.step()
    return running


def test_it_is_silent_while_all_is_well(driver: Driver) -> None:
    driver.finish()


def test_target_kv(driver: Driver) -> None:
    runner, (sequence,) = driver.engine.runner, driver.engine.scheduler.running
    slot = driver.engine.cache.slots(sequence.table, [4])[0]
    runner.tape[slot] = (0, 4)
    with pytest.raises(
        StateMismatch, match=r"target KV \(keys\) of r/0 is wrong from layer 0, position 4"
    ) as caught:
        driver.step()
    assert (caught.value.layer, caught.value.position) == (0, 4)


def test_positions(driver: Driver) -> None:
    runner, (sequence,) = driver.engine.runner, driver.engine.scheduler.running
    slot = driver.engine.cache.slots(sequence.table, [2])[0]
    runner.tape[slot] = (runner.tape[slot][0], 3)
    with pytest.raises(StateMismatch, match="position 2"):
        driver.step()


def test_drafter_kv(driver: Driver) -> None:
    drafter = driver.engine.drafters["model"].inner
    slot = drafter.committed("r/0")[1][1]
    drafter.runner.tape[slot] = (7, 1)
    with pytest.raises(StateMismatch, match="drafter KV"):
        driver.step()


def test_drafter_that_is_ahead(driver: Driver) -> None:
    drafter = driver.engine.drafters["model"].inner
    original = drafter.commit
    drafter.commit = lambda rid, tokens, features=None: original(rid, [*tokens, 1])  # type: ignore[method-assign]
    with pytest.raises(StateMismatch, match="drafter length"):
        driver.step()


def test_logits(driver: Driver) -> None:
    runner = driver.engine.runner
    original = runner.forward
    runner.forward = lambda rows: original(rows) * 1.5  # type: ignore[method-assign]
    with pytest.raises(StateMismatch, match="logits of r/0 is wrong"):
        driver.step()


def test_a_block_that_is_counted_too_low(driver: Driver) -> None:
    pool, (sequence,) = driver.engine.cache.pool, driver.engine.scheduler.running
    pool._references[sequence.table.blocks[0]] -= 1
    with pytest.raises(StateMismatch, match="KV block references"):
        driver.step()


def test_a_block_that_is_free_and_in_use(driver: Driver) -> None:
    pool, (sequence,) = driver.engine.cache.pool, driver.engine.scheduler.running
    pool._free.insert(0, sequence.table.blocks[0])
    with pytest.raises(StateMismatch, match="free KV blocks"):
        driver.step()


def test_a_block_that_leaks(driver: Driver) -> None:
    driver.engine.cache.pool._free.pop(0)
    with pytest.raises(StateMismatch, match="free KV blocks"):
        driver.step()


def test_sequences_are_checked_in_turn() -> None:
    engine = Engine(TapeRunner(), Letters(), options=EngineOptions(oracle=True))
    running = Driver(engine)
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    running.submit(GenerateRequest(str(i), (1, 2, i, 4, 5), sampling) for i in range(3))
    running.step()
    last = engine.scheduler.running[-1]
    engine.runner.tape[engine.cache.slots(last.table, [1])[0]] = (0, 1)
    with pytest.raises(StateMismatch, match="2/0"):
        for _ in range(3):
            running.step()
