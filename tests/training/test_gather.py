"""The data of a run, made in one go and in many."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from support.checkpoint import save_checkpoint

from gammaray.engine.loading import load_runner, load_tokenizer
from gammaray.errors import ConfigError
from gammaray.training.corpus import shards_of
from gammaray.training.gather import BARREN, Data, gather, texts
from gammaray.training.selfplay import Play
from gammaray.training.writer import Writer

PLAY = Play(wave=2, answer_tokens=20, temperatures=(0.0,))


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    model = save_checkpoint(tmp_path_factory.mktemp("target"), layers=4)
    return Writer(load_runner(model, "float32", num_blocks=64), load_tokenizer(model), max_batch=2)


@pytest.fixture
def data(tmp_path: Path) -> Data:
    lines = [json.dumps({"body": {"prompt": f"{i} times {i} is"}}) for i in range(5)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return Data(1000, tmp_path / "prompts.jsonl", PLAY)


def test_data_that_is_made_in_many_goes_is_the_same(tmp_path: Path, writer: Writer, data: Data) -> None:
    """Each go ends behind one piece of work, wherever that is: nothing is lost and nothing done twice."""
    said = list(gather(tmp_path / "whole", writer, "hash", data))
    assert [one.done for one in said if one.what == "writing"] == [0, 40, 80, 100]
    assert (said[-1].what, said[-1].done, said[-1].total) == ("reading", 5, 5)
    for _ in range(5):
        list(islice(gather(tmp_path / "parts", writer, "hash", data), 2))
    list(gather(tmp_path / "parts", writer, "hash", data))
    whole, parts = (texts(tmp_path / name) for name in ("whole", "parts"))
    for index in range(5):
        assert whole.corpus.document(index)[0].tolist() == parts.corpus.document(index)[0].tolist()
        assert whole.cache.document(index).equal(parts.cache.document(index))


def test_it_stops_at_enough_and_goes_on_for_more(tmp_path: Path, writer: Writer, data: Data) -> None:
    assert [one.done for one in gather(tmp_path, writer, "hash", replace(data, tokens=30))][:2] == [0, 40]
    assert len(texts(tmp_path).cache) == 2
    list(gather(tmp_path, writer, "hash", replace(data, tokens=70)))
    assert len(texts(tmp_path).cache) == 4


def test_a_corpus_of_other_settings_is_refused(tmp_path: Path, writer: Writer, data: Data) -> None:
    """Mixed, it could neither be made again nor be said in the card what it is."""
    list(gather(tmp_path / "run", writer, "hash", replace(data, tokens=1)))
    with pytest.raises(ConfigError, match="made with another target"):
        next(gather(tmp_path / "run", writer, "other", data))
    with pytest.raises(ConfigError, match="another questions and seed"):
        next(gather(tmp_path / "run", writer, "hash", Data(play=replace(PLAY, seed=1))))


def test_prompts_that_give_nothing_are_refused(tmp_path: Path, writer: Writer, data: Data) -> None:
    """Else a target that asks itself, and finds nothing to say, would do so for ever."""
    (tmp_path / "prompts.jsonl").write_text('{"body": {"prompt": "What?"}}\n' * 40)
    short = replace(data, play=replace(PLAY, answer_tokens=3))
    with pytest.raises(ConfigError, match="nothing that can be learned from"):
        list(gather(tmp_path / "run", writer, "hash", short))
    assert len(shards_of(tmp_path / "run" / "corpus")) == BARREN < 20
    with pytest.raises(ConfigError, match="cannot read prompts"):
        next(gather(tmp_path / "none", writer, "hash", replace(data, prompts=tmp_path / "none.jsonl")))


def test_states_of_texts_that_are_gone_are_not_taken_for_others(
    tmp_path: Path, writer: Writer, data: Data
) -> None:
    """As after a damaged corpus was removed: a head would learn from states of other texts."""
    list(gather(tmp_path / "run", writer, "hash", data))
    shutil.rmtree(tmp_path / "run" / "corpus")
    with pytest.raises(ConfigError, match="states of texts that are gone: remove it"):
        next(gather(tmp_path / "run", writer, "hash", replace(data, play=replace(PLAY, seed=1))))


def test_two_do_not_write_the_same_data(tmp_path: Path, writer: Writer, data: Data) -> None:
    """Their states would lie one behind the other."""
    first = gather(tmp_path / "run", writer, "hash", data)
    next(first)
    with pytest.raises(ConfigError, match="another process works in"):
        next(gather(tmp_path / "run", writer, "hash", data))
    first.close()
    list(gather(tmp_path / "run", writer, "hash", data))
