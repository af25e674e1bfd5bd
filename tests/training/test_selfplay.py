"""A target that answers its own questions and those of a file, on a tiny checkpoint of one token a byte."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import pytest
import torch
from support.checkpoint import byte_tokenizer, save_checkpoint

from gammaray.engine.bench.dataset import Prompt
from gammaray.engine.loading import load_runner, load_tokenizer
from gammaray.errors import ConfigError
from gammaray.training.corpus import Corpus
from gammaray.training.openings import opening
from gammaray.training.prompts import Frame, Given, Ids, Own
from gammaray.training.selfplay import Play, play
from gammaray.training.writer import Writer, Written
from gammaray.types import SamplingParams

HOW = Play(seed=3, wave=4, answer_tokens=24, temperatures=(0.0, 1.0))
PROMPTS = [Prompt(str(i), "all", f"Number {i} of {i * i} is") for i in range(9)]


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    model = save_checkpoint(tmp_path_factory.mktemp("target"))
    return Writer(load_runner(model, "float32", num_blocks=64), load_tokenizer(model), max_batch=3)


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_a_run_that_was_stopped_writes_what_it_would_have_written(tmp_path: Path, writer: Writer) -> None:
    """Seeds by the order of calls, or a memory of copies that begins anew, give another corpus."""
    source = Given(writer.tokenizer, [*PROMPTS[:6], PROMPTS[0], *PROMPTS[7:]])
    whole = list(play(tmp_path / "whole", writer, source, HOW))
    assert [wave.number for wave in whole] == [0, 1, 2]
    assert whole[1].dropped == {"copy": 1}  # the first prompt again, answered by the likeliest tokens
    for _ in range(3):  # each is stopped behind one wave
        next(play(tmp_path / "parts", writer, source, HOW))
    assert list(play(tmp_path / "parts", writer, source, HOW)) == []
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


def test_answers_are_marked_and_are_the_targets(tmp_path: Path, writer: Writer) -> None:
    """A mark that is off by one teaches the head to predict the prompt, or not the answer's first token."""
    list(
        play(
            tmp_path,
            writer,
            Given(writer.tokenizer, PROMPTS[:4]),
            Play(answer_tokens=24, temperatures=(0.0,)),
        )
    )
    corpus = Corpus.open(tmp_path)
    assert len(corpus) == 4
    for index in range(4):
        tokens, answers = corpus.document(index)
        prompt = [*writer.tokenizer(PROMPTS[index].ask)["input_ids"]]
        assert tokens[~answers].tolist() == prompt and not answers[: len(prompt)].any()
        best = writer.runner.dense(tokens.tolist())[0].argmax(-1)
        assert torch.equal(tokens[answers], best[len(prompt) - 1 : -1])


def test_what_does_not_fit_or_says_nothing_is_dropped_and_counted(tmp_path: Path, writer: Writer) -> None:
    prompts = [Prompt("long", "all", "x" * 252), PROMPTS[1], PROMPTS[2]]
    (wave,) = play(tmp_path, writer, Given(writer.tokenizer, prompts), Play(answer_tokens=5))
    assert wave.dropped == {"long": 1, "short": 2} and (wave.documents, wave.tokens) == (0, 0)
    assert len(Corpus.open(tmp_path).shards) == 1  # so that the next run does not try them again


class Scripted(Writer):
    """Notes what it is asked and says always the same."""

    def __init__(self, *texts: str, template: bool = True) -> None:
        self.tokenizer, self.texts = byte_tokenizer(), texts
        self.asked: dict[int, tuple[str, SamplingParams]] = {}
        if not template:
            self.tokenizer.chat_template = None

    def write(self, requests: Mapping[int, tuple[Ids, SamplingParams]]) -> dict[int, Written]:
        self.asked |= {
            number: (self.tokenizer.decode(ids), sampling) for number, (ids, sampling) in requests.items()
        }
        return {number: Written([], self.texts[number % len(self.texts)]) for number in requests}


def test_the_target_goes_on_as_a_user_and_is_then_asked_that() -> None:
    """Begun behind the turn instead of in it, the target would answer an empty question."""
    writer = Scripted(" is the sky so blue", "?", " \ufffd and many letters")
    asks = Own(writer, seed=5).asks(range(90))
    for number, (begun, sampling) in writer.asked.items():
        assert begun == "<user>" + opening(5, number)
        assert sampling.stop_token_ids == (writer.tokenizer.encode("\n")[0],)
    assert len({sampling.seed for _, sampling in writer.asked.values()}) == 90
    assert len({begun for begun, _ in writer.asked.values()}) > 30
    assert all((number in asks) == (number % 3 == 0) for number in range(90) if number % 3 != 1)
    complete = [number for number in range(1, 90, 3) if opening(5, number).endswith(".")]
    assert complete and [number for number in asks if number % 3 == 1] == complete
    for number, ids in asks.items():
        question = opening(5, number) + writer.texts[number % 3]
        assert writer.tokenizer.decode(ids) == f"<user>{question.strip()}\n<assistant>"


def test_a_model_without_a_template_goes_on_from_beginnings_of_texts() -> None:
    writer = Scripted(template=False)
    asks = Own(writer, seed=5).asks(range(20))
    end = writer.tokenizer.eos_token
    assert [writer.tokenizer.decode(asks[n]) for n in range(20)] == [end + opening(5, n) for n in range(20)]


def test_a_template_that_takes_no_turn_is_refused() -> None:
    tokenizer = byte_tokenizer()
    for template in ("{{ raise_exception('no') }}", "always the same", "{{ messages[0]['content'] * 2 }}"):
        tokenizer.chat_template = template
        with pytest.raises(ConfigError, match="give prompts in a file"):
            Frame.of(tokenizer)


def test_own_questions_become_a_corpus(tmp_path: Path, writer: Writer) -> None:
    """The whole way, with the questions of a random model: what it says is the same again."""
    runs = [
        list(islice(play(tmp_path / name, writer, Own(writer, seed=1), HOW), 2)) for name in ("one", "two")
    ]
    assert runs[0] == runs[1] and files(tmp_path / "one") == files(tmp_path / "two")
    assert all(wave.documents + sum(wave.dropped.values()) == HOW.wave for wave in runs[0])
