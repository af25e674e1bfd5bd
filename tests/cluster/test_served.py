"""What a draft worker runs: a real drafter's model on a real socket, without Ray."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.checkpoint import save_checkpoint
from support.serving import eventually

from gammaray.actors import served as module
from gammaray.actors.draft import Load, local_link
from gammaray.actors.link.pool import Member, PoolDrafter, over_sockets
from gammaray.actors.served import Served
from gammaray.config import Config, parse
from gammaray.engine.drafters.base import DraftView
from gammaray.errors import ConfigError, EngineFailure, VocabularyMismatch
from gammaray.types import SamplingParams

PROMPT = (5, 6, 7, 8)


def config(target: str, small: str) -> Config:
    drafters = {
        "small": {"method": "model", "model": small, "dtype": "float32"},
        "list": {"method": "ngram"},
    }
    return parse({"target": {"model": target, "kv": {"num_blocks": 40}}, "drafters": drafters}, "test")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("target"), layers=4)


def test_it_drafts_for_who_knows_the_secret(target: str, tmp_path: Path) -> None:
    served = local_link(config(target, save_checkpoint(tmp_path)), "small")
    assert isinstance(served, Served)
    served.check()
    assert served.load() == Load(0, 0, 0.0)
    drafter = PoolDrafter(lambda: [Member(served.address)], over_sockets("small", 257), 257)
    drafter.start()
    try:
        eventually(lambda: begun(drafter))
        ticket = drafter.begin([DraftView("r", len(PROMPT), 3, 1, SamplingParams(), 0)])
        trees = drafter.collect(ticket, time.perf_counter() + 10)
        assert len(trees["r"].tokens) == 3
        load = served.load()
        assert load.sequences == 1
        assert 0 < load.busy <= 1
    finally:
        drafter.close()
    eventually(lambda: served.load().sequences == 0)


def begun(drafter: PoolDrafter) -> bool:
    drafter.catch_up("r", PROMPT)
    return drafter.length("r") == len(PROMPT)


def test_a_drafter_of_another_vocabulary_is_refused(target: str, tmp_path: Path) -> None:
    with pytest.raises(VocabularyMismatch, match="small"):
        local_link(config(target, save_checkpoint(tmp_path / "larger", extra=3)), "small")
    with pytest.raises(ConfigError, match="other tokens"):
        local_link(config(target, save_checkpoint(tmp_path / "swapped", swap=True)), "small")


def test_a_drafter_without_a_model_has_no_workers(target: str) -> None:
    with pytest.raises(ConfigError, match="no model of its own"):
        local_link(config(target, target), "list")


def test_one_that_no_longer_serves_says_so(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "serve", lambda *arguments: None)  # its thread ends
    served = local_link(config(target, save_checkpoint(tmp_path)), "small")
    assert isinstance(served, Served)
    eventually(lambda: not served._thread.is_alive())
    with pytest.raises(EngineFailure, match="ended"):
        served.check()
