"""Self-distillation: the target answers its own questions, or those of a file, and the answers are kept.

The work is done in waves. A wave is written together, sifted, and sealed as one shard of the corpus, so a run
that was stopped goes on with the wave that it was in. What a wave says follows from the seed and from the
waves before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gammaray.training.corpus import Corpus, Document, seal
from gammaray.training.openings import draw
from gammaray.training.prompts import Source
from gammaray.training.sifting import FEWEST, Seen, before_loop
from gammaray.training.writer import Ids, Writer
from gammaray.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Play:
    """How answers are drawn. Each temperature in turn; 0 is what most drafters are judged by."""

    seed: int = 0
    wave: int = 128  # questions
    answer_tokens: int = 256  # at most
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)


@dataclass(frozen=True, slots=True)
class Wave:
    """What came of one. `dropped` counts by the reason: question, long, short, copy; `cut` answers had loops,
    and the part before is kept."""

    number: int
    documents: int
    tokens: int  # that the target wrote, of those that are kept
    dropped: Mapping[str, int]
    cut: int


def play(folder: Path, writer: Writer, source: Source, how: Play = Play()) -> Iterator[Wave]:
    """Add waves to the corpus in `folder`, one with each `next`, until the source has no more.

    Deterministic by seed. Raises ConfigError, EngineFailure.
    """
    corpus, seen = Corpus.open(folder), Seen()
    for index in range(len(corpus)):
        tokens, answers = corpus.document(index)
        seen.add(tokens[answers].tolist())
    number = len(corpus.shards)
    while source.size is None or number * how.wave < source.size:
        end = (number + 1) * how.wave
        numbers = range(number * how.wave, end if source.size is None else min(end, source.size))
        wave, documents = _wave(number, numbers, writer, source, how, seen)
        seal(folder, documents)
        yield wave
        number += 1


def _wave(
    number: int, numbers: range, writer: Writer, source: Source, how: Play, seen: Seen
) -> tuple[Wave, list[Document]]:
    dropped, cut, documents = Counter[str](), 0, list[Document]()
    asks = source.asks(numbers)
    fitting = {n: ids for n, ids in asks.items() if len(ids) + FEWEST <= writer.longest}
    dropped.update(question=len(numbers) - len(asks), long=len(asks) - len(fitting))
    written = writer.write({n: (ids, _sampling(n, ids, writer, how)) for n, ids in fitting.items()})
    for n, text in written.items():
        kept = before_loop(text.ids)
        answer = text.ids[:kept]
        if len(answer) < FEWEST:
            dropped["short"] += 1
        elif not seen.add(answer):
            dropped["copy"] += 1
        else:
            cut += kept < len(text.ids)
            documents.append(Document.answered(fitting[n], answer))
    tokens = sum(sum(document.answers) for document in documents)
    return Wave(number, len(documents), tokens, +dropped, cut), documents


def _sampling(number: int, ask: Ids, writer: Writer, how: Play) -> SamplingParams:
    """Nothing is cut off the distribution: what is learned is the target's own."""
    return SamplingParams(
        temperature=how.temperatures[number % len(how.temperatures)],
        seed=draw(how.seed, number, "answer"),
        max_tokens=min(how.answer_tokens, writer.longest - len(ask)),
    )
