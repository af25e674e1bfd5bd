"""Speculative = plain for every registered drafter, as it is built from a configuration: greedy and seeded,
chains and trees, with and without trimming, alone and mixed in one batch, drafting before the target verifies
and beside it. Float32, with the state oracle on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.decoding import Driver, Outcome, run
from support.registered import EOS, FORMS, VOCAB, configuration
from support.tape import Letters

from gammaray.drafter_config import METHODS
from gammaray.engine.build import build_drafter
from gammaray.engine.drafters.base import Drafter
from gammaray.engine.drafters.registry import MODULES
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.loading import load_runner, load_tokenizer
from gammaray.engine.profile import StepProfile
from gammaray.engine.runner import ModelRunner
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan

STEEP = StepProfile(((1, 1.0), (2, 1.05), (4, 1.2), (8, 1.9), (64, 15.0)))  # trims most of what is unlikely


@dataclass(frozen=True)
class World:
    target: ModelRunner
    drafters: Mapping[str, Drafter]
    known: dict[GenerateRequest, dict[tuple[str, int], Outcome]] = field(default_factory=dict)

    def engine(
        self, budget: int = 48, trims: bool = False, prefix_cache: bool = True, asynchronous: bool = False
    ) -> Engine:
        options = EngineOptions(
            max_batch=4,
            token_budget=budget,
            oracle=True,
            prefix_cache=prefix_cache,
            asynchronous=asynchronous,
        )
        profile = STEEP if trims else None
        return Engine(self.target, Letters(), [EOS], self.drafters, options, profile=profile)

    def plainly(self, request: GenerateRequest) -> dict[tuple[str, int], Outcome]:
        """The same requests come again and again, with other drafters."""
        plain = replace(request, plan=PLAIN)
        if plain not in self.known:
            self.known[plain] = run(self.engine(), [plain])
        return self.known[plain]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    config = configuration(tmp_path_factory.mktemp("drafters"))
    own = config.target
    target = load_runner(own.model, "float32", own.kv.block_size, own.kv.num_blocks)
    tokenizer = load_tokenizer(own.model)
    names = sorted(config.drafters)
    return World(target, {name: build_drafter(name, config, target, tokenizer) for name in names})


def test_every_method_is_registered_and_in_this_suite() -> None:
    assert set(METHODS) == set(MODULES) == set(FORMS)


def request(rid: str, drafter: str, gamma: int, width: int, temperature: float, seed: int) -> GenerateRequest:
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True)
    plan = SpeculationPlan(drafter, gamma, width, adaptive=bool(seed % 2))
    return GenerateRequest(rid, (1, 2, 3, 1, 2, seed % VOCAB), sampling, plan)


SHAPES = ((1, 1, 0.0), (4, 1, 0.0), (4, 1, 1.0), (3, 4, 0.0), (4, 3, 1.0))  # gamma, width, temperature


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("method", sorted(FORMS))
def test_each_drafter_alone_is_accepted_and_changes_nothing(world: World, method: str, trims: bool) -> None:
    """Chains and trees, greedy and seeded, long enough for whole blocks to be accepted."""
    forms = [name for name in world.drafters if name == method or name.startswith(f"{method}-")]
    assert method in forms
    for form in forms:
        accepted = 0
        for number, shape in enumerate(SHAPES):
            driver = Driver(world.engine(trims=trims, asynchronous=bool(number % 2)))
            batch = [request(str(seed), form, *shape, seed) for seed in (1, 2, 3)]
            driver.submit(batch)
            driver.finish()
            assert not any(report.drafter_failures for report in driver.reports), form  # a guard hides them
            for asked in batch:
                (expected,) = world.plainly(asked).values()
                found = driver.outcomes[asked.request_id, 0]
                assert (found.ids, found.finish) == (expected.ids, expected.finish), (form, asked)
                assert found.stats is not None
                accepted += found.stats.accepted
        assert accepted > 0, form  # else equality would say nothing


@settings(max_examples=60, phases=(Phase.reuse, Phase.generate))  # to shrink takes minutes
@given(data=st.data())
def test_all_drafters_in_one_batch_change_nothing(world: World, data: st.DataObject) -> None:
    """Any mix, with chunked prefill, shared prefixes, n = 2, aborts, and plain requests between."""
    names = st.sampled_from([None, *world.drafters])
    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=20).map(tuple)
    count = data.draw(st.integers(1, 5))
    batch = [
        replace(
            request(
                str(i),
                data.draw(names) or "",
                data.draw(st.integers(1, 5)),
                data.draw(st.integers(1, 4)),
                data.draw(st.sampled_from([0.0, 1.0])),
                data.draw(st.integers(0, 2**63)),
            ),
            prompt=data.draw(prompts),
            n=data.draw(st.integers(1, 2)),
        )
        for i in range(count)
    ]
    batch = [one if one.plan.drafter else replace(one, plan=PLAIN) for one in batch]
    budget, cache = data.draw(st.sampled_from([8, 16, 48])), data.draw(st.booleans())
    engine = world.engine(budget, data.draw(st.booleans()), cache, asynchronous=data.draw(st.booleans()))
    steps, aborted = data.draw(st.integers(1, 12)), data.draw(st.sets(st.integers(0, count - 1)))
    driver = Driver(engine)  # from here on nothing is drawn: that may end an example, and leave its states
    driver.submit(batch)
    for _ in range(steps):
        if not engine.idle:
            driver.step()
    for rid in aborted:
        engine.abort(str(rid))  # perhaps between the beginning of its draft and the end
    driver.finish()
    outcomes = driver.outcomes
    assert not any(report.drafter_failures for report in driver.reports)  # a guard would hide them
    for one in batch:
        for key, expected in world.plainly(one).items():
            found = outcomes[key].ids
            whole = outcomes[key].finish != "abort"
            assert found == (expected.ids if whole else expected.ids[: len(found)]), one
    assert engine.cache.pool.used == 0
    for name, drafter in world.drafters.items():
        for key in outcomes:
            assert drafter.length(f"{key[0]}/{key[1]}") is None, name  # nothing is kept of what has ended
