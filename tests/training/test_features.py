"""Cached states against passes of transformers' own model, and how a cache goes on."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from tiny import tiny_llama

from gammaray.engine.loading import load_runner
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError
from gammaray.training import features
from gammaray.training.corpus import Corpus, Document, seal
from gammaray.training.features import Cache, default_layers, fill

LENGTHS = [3, 9, 30, 1, 4, 4, 17]  # the third takes four passes of 8, in which the fifth and sixth are one
LAYERS = (1, 3, 0, 5)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return load_runner(tiny_llama(layers=4), "float32", block_size=4, num_blocks=9)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    draw = random.Random(0)
    texts = [tuple(draw.randrange(32) for _ in range(length)) for length in LENGTHS]
    for part in (texts[:4], texts[4:]):
        seal(tmp_path / "corpus", [Document.answered(text[:1], text[1:]) for text in part])
    return Corpus.open(tmp_path / "corpus")


def test_states_are_the_targets_own(
    tmp_path: Path, runner: ModelRunner, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong start, table or order of a pass shows in the states of some document."""
    monkeypatch.setattr(features, "PASS_TOKENS", 8)
    assert list(fill(tmp_path / "states", corpus, runner, "t", LAYERS))[-1] == len(LENGTHS)
    cache, model = Cache(tmp_path / "states", corpus), tiny_llama(layers=4)
    for index in range(len(cache)):
        tokens, _ = corpus.document(index)
        with torch.no_grad():
            out = model(input_ids=tokens[None], output_hidden_states=True)
        expected = torch.cat([out.hidden_states[layer][0] for layer in (1, 3, 0, 4)], -1)  # 4: normed
        torch.testing.assert_close(cache.document(index), expected, atol=1e-4, rtol=0)
        logits = runner.telling.head(cache.document(index, (5,)))
        torch.testing.assert_close(logits, out.logits[0], atol=1e-4, rtol=0)


def test_a_cache_goes_on_where_it_was_stopped(
    tmp_path: Path, runner: ModelRunner, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a row that stays would shift all that follow; so would documents done twice."""
    monkeypatch.setattr(features, "PASS_TOKENS", 8)
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert list(fill(whole, corpus, runner, "t", LAYERS)) == [0, 1, 2, 3, 5, 6, 7]
    assert list(islice(fill(part, corpus, runner, "t", LAYERS), 3)) == [0, 1, 2]
    with (part / "states.rows").open("ab") as file:
        file.write(b"\7" * (12 * 512 + 100))  # rows of the third document, which are not all there
    assert len(Cache(part, corpus)) == 2
    assert list(fill(part, corpus, runner, "t", LAYERS)) == [2, 3, 5, 6, 7]
    assert (part / "states.rows").read_bytes() == (whole / "states.rows").read_bytes()
    assert list(fill(part, corpus, runner, "t", LAYERS)) == [7]


def test_shards_that_come_later_get_their_states(tmp_path: Path, runner: ModelRunner, corpus: Corpus) -> None:
    list(fill(tmp_path / "states", corpus, runner, "t", LAYERS))
    seal(tmp_path / "corpus", [Document.answered((3,), (1, 4))])
    longer = Corpus.open(tmp_path / "corpus")
    assert len(Cache(tmp_path / "states", longer)) == 7
    assert list(fill(tmp_path / "states", longer, runner, "t", LAYERS)) == [7, 8]
    again = tmp_path / "again"
    list(fill(again, longer, runner, "t", LAYERS))
    for index in (0, 7):
        ours, theirs = (Cache(folder, longer).document(index) for folder in (tmp_path / "states", again))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_states_of_another_target_are_refused(tmp_path: Path, runner: ModelRunner, corpus: Corpus) -> None:
    """A head that learned from the states of one target and the answers of another is worth nothing."""
    list(fill(tmp_path / "states", corpus, runner, "one", LAYERS))
    with pytest.raises(ConfigError, match="made with another target: give"):
        next(fill(tmp_path / "states", corpus, runner, "other", LAYERS))
    with pytest.raises(ConfigError, match="another layers and width"):
        next(fill(tmp_path / "states", corpus, runner, "one", (1, 2)))
    with pytest.raises(ConfigError, match="fill it first"):
        Cache(tmp_path / "nothing", corpus)


def test_a_document_that_does_not_fit_is_refused(tmp_path: Path, runner: ModelRunner, corpus: Corpus) -> None:
    seal(tmp_path / "corpus", [Document.answered((3,), (1,) * 36)])
    with pytest.raises(ConfigError, match="document 7 of the corpus has 37 tokens and the target takes 36"):
        next(fill(tmp_path / "states", Corpus.open(tmp_path / "corpus"), runner, "t", LAYERS))


def test_states_are_kept_in_the_targets_own_numbers(tmp_path: Path, corpus: Corpus) -> None:
    """Rounded to fewer bits, the logits that they give would not be the target's."""
    runner = load_runner(tiny_llama(layers=4), "bfloat16", block_size=4, num_blocks=9)
    list(fill(tmp_path / "states", corpus, runner, "t"))
    cache = Cache(tmp_path / "states", corpus)
    assert cache.about.layers == default_layers(4) == (2, 2, 1, 5)
    assert cache.document(0).dtype == torch.bfloat16 and cache.document(0).shape == (3, 128)
    assert (tmp_path / "states" / "states.rows").stat().st_size == corpus.tokens * 128 * 2
