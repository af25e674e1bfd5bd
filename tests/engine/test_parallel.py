"""A target on two ranks, in two processes over gloo: the same tokens as on one, and how ranks are lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.checkpoint import save_checkpoint
from support.decoding import Driver, Outcome, run
from support.tape import Letters
from support.two_ranks import PROCESSES, Make, broken, follow, lead, start, two_ranks
from tiny import tiny_llama, tiny_model
from transformers import PreTrainedModel, Qwen3Config

from gammaray.config import Config, parse
from gammaray.engine import build
from gammaray.engine.batch import Row
from gammaray.engine.drafters.model import ModelDrafter
from gammaray.engine.drafters.ngram import NgramDrafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.loading import load_runner
from gammaray.engine.parallel import ParallelRunner
from gammaray.engine.peers import Link
from gammaray.engine.ranks import Seat, host
from gammaray.engine.runner import ModelRunner
from gammaray.engine.service import AsyncEngine
from gammaray.errors import ConfigError, EngineFailure, ReplicaLost, StateMismatch
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan

VOCAB = 12
LLAMA = partial(tiny_llama, VOCAB, 3)
QWEN = partial(tiny_model, Qwen3Config, VOCAB, 2, head_dim=8)
ODD = partial(tiny_llama, VOCAB, num_key_value_heads=1)
SHAPE = {"dtype": "float32", "block_size": 4, "num_blocks": 20, "max_model_len": 64}
Pair = tuple[ParallelRunner, ModelRunner]


@pytest.fixture(scope="module", params=[LLAMA, QWEN], ids=["llama", "qwen3"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """One model on two ranks, and on one."""
    with two_ranks(request.param, **SHAPE) as (two, _):
        yield two, load_runner(request.param(), **SHAPE)


def nearly(model: PreTrainedModel) -> PreTrainedModel:
    """A drafter that is right often, not always."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


def engine(runner: ModelRunner, drafter: ModelRunner | None = None, **options: object) -> Engine:
    drafters = {"ngram": NgramDrafter(3, 1)}
    if drafter is not None:
        drafters["model"] = ModelDrafter(drafter, draft_sampling=True)
    told = EngineOptions(max_batch=4, token_budget=16, oracle=True, **options)
    return Engine(runner, Letters(), drafters=drafters, options=told)


def requests(plans: list[SpeculationPlan], max_tokens: int = 12) -> list[GenerateRequest]:
    """Each plan greedy and seeded; all prompts begin alike."""
    return [
        GenerateRequest(
            f"{at}-{temperature}",
            (1, 2, 3, 4, 5, 6, 7, 8, at, 2, 3),
            SamplingParams(temperature=temperature, seed=at, max_tokens=max_tokens),
            plan,
        )
        for at, plan in enumerate(plans)
        for temperature in (0.0, 1.0)
    ]


def ids(outcomes: dict[tuple[str, int], Outcome]) -> dict[tuple[str, int], tuple[list[int], str | None]]:
    return {key: (outcome.ids, outcome.finish) for key, outcome in outcomes.items()}


def test_logits_are_those_of_one_rank(pair: Pair) -> None:
    steps = [
        [Row(range(1, 10), 0, [7, 3, 5], logits=4), Row([4, 5], 0, [2, 9], [6, 7, 8, 9], [-1, 0, 0, 2])],
        [Row([10, 11], 9, [7, 3, 5], logits=0), Row([6], 2, [2, 9], [1, 2], [-1, -1])],
    ]
    for rows in steps:
        two, one = (runner.forward(rows) for runner in pair)
        torch.testing.assert_close(two, one, atol=1e-4, rtol=0)
        assert not two.is_inference()


def test_hidden_states_are_those_of_one_rank(pair: Pair) -> None:
    rows = [Row([1, 2, 3], 0, [7], logits=2)]
    for two, one in zip(*(runner.forward_features(rows, (0, 1, 2)) for runner in pair), strict=True):
        torch.testing.assert_close(two, one, atol=1e-4, rtol=0)


def test_dense_passes_and_the_kv_read_back_have_the_heads_of_all_ranks(pair: Pair) -> None:
    tokens = [3, 1, 4, 1, 5, 9]
    for runner in pair:
        runner.forward([Row(tokens, 0, [8, 1])])
        runner.move([33, 34], [60, 61])
    order = [32, 33, 34, 35, 4, 5]  # slots of the six tokens
    dense = [runner.dense(tokens) for runner in pair]
    torch.testing.assert_close(dense[0][0], dense[1][0], atol=1e-4, rtol=0)
    for kv in zip(dense[0][1], dense[1][1], *(runner.read_kv(order) for runner in pair), strict=True):
        for two, one, read_two, read_one in zip(*kv, strict=True):
            assert two.shape == one.shape == (6, 2, 8)
            torch.testing.assert_close(two, one, atol=1e-4, rtol=0)
            torch.testing.assert_close(read_two, read_one, atol=1e-4, rtol=0)
            torch.testing.assert_close(read_two, two, atol=1e-4, rtol=0)
    for kv, moved in zip(dense[0][1], pair[0].read_kv([60, 61]), strict=True):
        for all_tokens, two_tokens in zip(kv, moved, strict=True):
            torch.testing.assert_close(two_tokens, all_tokens[1:3], atol=1e-4, rtol=0)


def test_every_way_of_decoding_gives_the_tokens_of_one_rank(pair: Pair) -> None:
    two, one = pair
    drafter = load_runner(nearly(tiny_llama(VOCAB, 3)), **SHAPE)
    plans = [PLAIN, SpeculationPlan("ngram", 3), SpeculationPlan("model", 3), SpeculationPlan("model", 3, 2)]
    found = run(engine(two, drafter), requests(plans))
    plain = [replace(request, plan=PLAIN) for request in requests(plans)]
    assert ids(found) == ids(run(engine(one), plain))
    assert all(found[request.request_id, 0].stats.verified for request in requests(plans)[2:])


def test_shared_prefixes_and_preemption_give_the_tokens_of_one_rank(pair: Pair) -> None:
    batch = requests([PLAIN, SpeculationPlan("ngram", 4)], max_tokens=20)
    drivers = [Driver(engine(runner)) for runner in pair]
    for driver in drivers:
        driver.submit(batch)
        driver.finish()
        driver.submit([replace(batch[0], request_id="again")])
        driver.finish()
        assert sum(report.preempted for report in driver.reports) > 0
    assert ids(drivers[0].outcomes) == ids(drivers[1].outcomes)
    assert drivers[0].outcomes["again", 0].ids == drivers[0].outcomes["0-0.0", 0].ids


def test_the_oracle_sees_a_rank_whose_kv_is_wrong(pair: Pair) -> None:
    """It reads the KV of all ranks: a move that only rank 0 does shows."""
    two, _ = pair
    served = Driver(engine(two))
    served.submit(requests([PLAIN]))
    for _ in range(4):
        served.step()
    sequence = next(iter(served.engine.scheduler.running))
    slots = served.engine.cache.slots(sequence.table, [1, 3])
    two.move(slots[:1], slots[1:])  # all ranks: still wrong
    with pytest.raises(StateMismatch, match="target KV"):
        served.finish()


def lead_here(seat: Seat) -> ParallelRunner:
    link = Link(seat)
    runner = load_runner(link.together(LLAMA), ranks=link, **SHAPE)
    assert isinstance(runner, ParallelRunner)
    return runner


def test_the_smallest_pool_counts() -> None:
    seat = host(2)
    process = start(follow, LLAMA, seat.meeting, {**SHAPE, "num_blocks": 17})
    runner = lead_here(seat)
    assert runner.num_blocks == 17
    runner.close()
    process.join(10)
    assert process.exitcode == 0
    with pytest.raises(ReplicaLost, match="parted"):
        runner.forward([Row([1], 0, [0])])


# Failures --------------------------------------------------------------------------------------------


async def first_chunk_then(service: AsyncEngine, act: Callable[[], object]) -> float:
    """Seconds from `act`, after the first chunk, to the stream's ReplicaLost."""
    sampling = SamplingParams(temperature=0.0, max_tokens=50)
    stream = service.generate(GenerateRequest("r", (1, 2, 3), sampling))
    await anext(stream)
    act()
    began = time.monotonic()
    with pytest.raises(ReplicaLost, match="a rank of the target is gone or stuck"):
        async for _ in stream:
            pass
    return time.monotonic() - began


def test_a_killed_follower_ends_the_replica_within_a_second() -> None:
    with two_ranks(LLAMA, **SHAPE) as (two, process):
        service = AsyncEngine(engine(two))
        assert asyncio.run(first_chunk_then(service, process.kill)) < 1.0
        with pytest.raises(EngineFailure, match="has stopped"):
            service.check_health()
        assert service.health().state == "stopped"
        service.shutdown()


def test_a_follower_that_hangs_ends_the_replica_after_the_timeout() -> None:
    with two_ranks(LLAMA, timeout_s=0.5, **SHAPE) as (two, process):
        service = AsyncEngine(engine(two))
        stopped = asyncio.run(first_chunk_then(service, partial(os.kill, process.pid, signal.SIGSTOP)))
        assert 0.4 < stopped < 2.0
        os.kill(process.pid, signal.SIGCONT)
        process.join(5)
        assert process.exitcode == 1  # it finds itself alone


def test_a_failure_of_rank_0_in_a_step_parts_the_ranks() -> None:
    """The other rank has begun the step; there is no going back for it."""
    with two_ranks(LLAMA, **SHAPE) as (two, process):
        two.forward([Row([1], 0, [0])])
        with pytest.raises(ValueError, match="0 blocks"):  # before the order: no harm
            two.forward([Row([1], 0, [])])
        two._model.forward = None
        with pytest.raises(ReplicaLost, match="out of step: TypeError"):
            two.forward([Row([1], 0, [0])])
        process.join(5)
        assert process.exitcode == 1


def test_an_idle_target_outlives_the_timeout_of_a_step() -> None:
    with two_ranks(LLAMA, timeout_s=0.5, **SHAPE) as (two, _):
        time.sleep(1.0)
        assert two.forward([Row([1], 0, [0])]).shape == (1, VOCAB)


def test_a_killed_rank_0_leaves_no_process_behind() -> None:
    ours, theirs = PROCESSES.Pipe()
    leader = start(lead, LLAMA, theirs, SHAPE)
    follower = start(follow, LLAMA, ours.recv(), SHAPE)
    for _ in range(3):
        ours.recv()  # steps
    leader.kill()
    follower.join(1.0)
    assert follower.exitcode == 1


@pytest.mark.parametrize(
    "make, follower, message",
    [
        (LLAMA, broken, "rank 1 of the target failed: no such model here"),
        (broken, LLAMA, "no such model here"),
        (LLAMA, QWEN, r"rank 0: Llama\w+ of 12 .*rank 1: Qwen3\w+ of 12"),
        (ODD, ODD, "2 does not divide the 4 attention heads and 1 key-value heads"),
    ],
)
def test_a_start_that_fails_on_one_rank_fails_on_all(make: Make, follower: Make, message: str) -> None:
    seat = host(2)
    process = start(follow, follower, seat.meeting, SHAPE)
    with pytest.raises((ConfigError, OSError), match=message):
        link = Link(seat)
        load_runner(link.together(make), ranks=link, **SHAPE)
    process.join(10)
    assert process.exitcode == 1


# From a configuration --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def config(model: str, **target: object) -> Config:
    told = {"model": model, "dtype": "float32", "tensor_parallel": 2, "kv": {"num_blocks": 32}, **target}
    return parse({"target": told, "drafters": {"lookup": {"method": "ngram"}}}, "test")


def test_a_configuration_is_served_by_two_ranks(checkpoint: str) -> None:
    seat = host(2)
    process = start(build.follow, config(checkpoint), 1, seat.meeting)
    request = GenerateRequest("r", tuple(b"one two one two"), SamplingParams(temperature=0.0, max_tokens=20))
    two = build.build_engine(config(checkpoint), oracle=True, ranks=seat)
    one = build.build_engine(config(checkpoint, tensor_parallel=1))
    assert ids(run(two, [request])) == ids(run(one, [request]))
    two.runner.close()
    process.join(10)
    assert process.exitcode == 0


def test_tensor_parallel_without_ranks_is_refused(checkpoint: str) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel 2 takes as many processes and here are 1"):
        build.build_engine(config(checkpoint))


def test_deterministic_is_refused() -> None:
    refused = pytest.raises(ConfigError, match="deterministic does not work with tensor_parallel yet")
    with refused, two_ranks(LLAMA, deterministic=True, **SHAPE):
        pass


def test_a_rank_of_another_generation_does_not_join() -> None:
    seat = host(2, generation=5)
    stale = replace(seat.meeting, generation=4)
    process = start(follow, LLAMA, stale, SHAPE)
    current = start(follow, LLAMA, seat.meeting, SHAPE)
    runner = lead_here(seat)
    assert runner.forward([Row([1], 0, [0])]).shape == (1, VOCAB)
    assert process.is_alive()  # waits for the rank 0 of its own
    process.kill()
    runner.close()
    current.join(10)
    assert current.exitcode == 0
