"""From a target to texts with their states: the first half of every run that trains a head.

data/corpus     documents (`corpus.py`), and `about.json`: what they were made with
data/states     the target's hidden states over them (`features.py`)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from gammaray import papers
from gammaray.engine.bench import dataset
from gammaray.errors import ConfigError
from gammaray.training.batches import Texts
from gammaray.training.corpus import Corpus
from gammaray.training.features import Cache, check_known, fill
from gammaray.training.files import bind, held
from gammaray.training.prompts import Given, Own, Source
from gammaray.training.selfplay import Play, Wave, play
from gammaray.training.writer import Writer

CORPUS, STATES = "corpus", "states"
BARREN = 8  # waves in a row that came to nothing: no more will come
PLAY = Play()


@dataclass(frozen=True, slots=True)
class Data:
    """What a head learns from."""

    tokens: int = 1_000_000  # that the target writes, at least, unless the prompts of a file give fewer
    prompts: Path | None = None  # a file of them; None: the target asks itself
    play: Play = PLAY
    layers: tuple[int, ...] | None = None  # whose states are kept; None: see `features.default_layers`

    def made_with(self, target: str) -> dict[str, object]:
        """What a corpus cannot change while it grows. Raises ConfigError."""
        asked = "its own"
        if self.prompts is not None:
            if (digest := papers.sha256(self.prompts)) is None:
                raise ConfigError(f"cannot read prompts {str(self.prompts)!r}")
            asked = f"sha256 {digest}"
        return {"target": target, "questions": asked, **asdict(self.play)}


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total`: tokens while the target writes, then documents while it reads them."""

    what: Literal["writing", "reading"]
    done: int
    total: int
    wave: Wave | None = None  # that was just written


def gather(folder: Path, writer: Writer, target: str, data: Data) -> Iterator[Progress]:
    """Make the data of a run in `folder`, or what of it is missing; may stop at any `next` and goes on there.

    `target`: see `gammaray.engine.identity`. Raises ConfigError for a folder that was made with other
    settings or that another process works in, a file that holds no prompts, and when nothing was written that
    could be learned from.
    """
    with held(folder):
        yield from _gather(folder, writer, target, data)


def _gather(folder: Path, writer: Writer, target: str, data: Data) -> Iterator[Progress]:
    place = folder / CORPUS
    bind(place / "about.json", data.made_with(target))
    check_known(folder / STATES, Corpus.open(place))
    written = int(Corpus.open(place).counts(writer.runner.vocab_size).sum())
    yield Progress("writing", written, data.tokens)
    if written < data.tokens:
        barren = 0
        for wave in play(place, writer, _source(writer, data), data.play):
            written += wave.tokens
            barren = 0 if wave.tokens else barren + 1
            if barren == BARREN:
                break
            yield Progress("writing", written, data.tokens, wave)
            if written >= data.tokens:
                break
    corpus = Corpus.open(place)
    if not len(corpus):
        raise ConfigError("the target wrote nothing that can be learned from: give other prompts")
    for done in fill(folder / STATES, corpus, writer.runner, target, data.layers):
        yield Progress("reading", done, len(corpus))


def texts(folder: Path, tokens: int | None = None) -> Texts:
    """What `gather` made in `folder`: all, or as many shards as have so many `tokens` that the target wrote,
    which are the same ones when others were added since. Raises ConfigError when that is not there."""
    corpus = Corpus.open(folder / CORPUS).first(tokens)
    return Texts(corpus, Cache(folder / STATES, corpus))


def _source(writer: Writer, data: Data) -> Source:
    if data.prompts is None:
        return Own(writer, data.play.seed)
    return Given(writer.tokenizer, dataset.read(data.prompts))
