"""What holds for every registered drafter: the chain check knows it, and so does a deterministic target."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.decoding import run
from support.registered import EOS, FORMS, VOCAB, configuration
from support.tape import Letters

from gammaray.config import Config
from gammaray.drafter_config import WEIGHTLESS
from gammaray.engine.build import build_drafter
from gammaray.engine.drafters.base import Drafter
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.loading import load_runner, load_tokenizer
from gammaray.engine.validate import validate
from gammaray.errors import ConfigError
from gammaray.types import PLAIN, GenerateRequest, SamplingParams, SpeculationPlan

FEATURED = {"medusa", "eagle", "eagle3", "mtp", "dspark"}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return configuration(tmp_path_factory.mktemp("drafters"))


def test_the_chain_check_describes_every_drafter(settings: Config) -> None:
    """A drafter that it takes for another would be said to need no weights."""
    found = {check.name: check for check in validate(settings)}
    for name, own in settings.drafters.items():
        check = found[f"drafter {name}"]
        assert check.ok, check.detail
        said = "continues the target's hidden states" in check.detail
        assert said == (own.method in FEATURED), check.detail
        model = check.detail.startswith(("model of", "recurrent model of"))
        assert model == (own.method == "model"), check.detail
    assert {own.method for own in settings.drafters.values()} == set(FORMS)


def test_a_deterministic_target_has_the_drafters_that_it_can_have(settings: Config) -> None:
    """It tells no hidden states, but its first layers are as good as any other's."""
    own = settings.target
    target = load_runner(own.model, "float32", own.kv.block_size, own.kv.num_blocks, deterministic=True)
    tokenizer = load_tokenizer(own.model)
    drafters: dict[str, Drafter] = {}
    refused: dict[str, str] = {}
    for name, entry in settings.drafters.items():
        if entry.method in WEIGHTLESS | FEATURED | {"layer_exit"}:
            try:
                drafters[name] = build_drafter(name, settings, target, tokenizer)
            except ConfigError as error:
                refused[name] = error.message
    assert {settings.drafters[name].method for name in refused} == FEATURED
    assert all("set deterministic: false" in message for message in refused.values())
    engine = Engine(target, Letters(), [EOS], drafters, EngineOptions(max_batch=4, oracle=True))
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    plain = GenerateRequest("r", (1, 2, 3, 1, 2, VOCAB - 2), sampling, PLAIN)
    (expected,) = run(engine, [plain]).values()
    plans = [SpeculationPlan("layer_exit", 3, 2), SpeculationPlan("layer_exit-own-head", 3)]
    outcomes = run(engine, [replace(plain, request_id=str(i), plan=plan) for i, plan in enumerate(plans)])
    assert all(outcome.ids == expected.ids for outcome in outcomes.values())
    assert sum(outcome.stats.accepted for outcome in outcomes.values() if outcome.stats) > 0
