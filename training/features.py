"""The target's hidden states over a corpus, kept so that every epoch after the first costs the head alone.

A cache is a folder: `about.json`, and one file of rows, [T, L * H] over all tokens of the corpus in order.
Row i is the state behind token i, in the layers asked for. The last of these is by default what the target's
head reads, so that `ModelRunner.telling.head` gives the target's logits behind every token again: soft
targets over the whole vocabulary that take no disk.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gammaray.engine.batch import Row
from gammaray.engine.device import DTYPES
from gammaray.engine.hidden import of_layers
from gammaray.engine.runner import ModelRunner
from gammaray.errors import ConfigError
from gammaray.training.corpus import Corpus
from gammaray.training.files import bind, noted, sync

PASS_TOKENS = 1024  # of one pass of the target; more takes memory and saves nothing
ROWS, ABOUT = "states.rows", "about.json"


@dataclass(frozen=True, slots=True)
class About:
    """What the rows are. A cache is of use for nothing else."""

    target: str  # see `gammaray.engine.identity`
    layers: tuple[int, ...]  # as `ModelRunner.forward_features` counts them
    width: int  # L * H
    dtype: str  # that of the target, so nothing is rounded

    @property
    def row_bytes(self) -> int:
        return self.width * DTYPES[self.dtype].itemsize


class Cache:
    """The rows of the documents that are done, mapped into memory."""

    def __init__(self, folder: Path, corpus: Corpus) -> None:
        """Raises ConfigError when there is none."""
        self.about = _read_about(folder)
        self._ends = corpus.ends
        self._done = _done(folder, self.about, corpus)
        self._file = folder / ROWS
        self._rows = self._map()

    def __len__(self) -> int:
        """Documents."""
        return self._done

    def document(self, index: int, layers: Sequence[int] | None = None) -> Tensor:
        """[T, L * H] of the layers of the cache, or of some of them. Raises IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of the {len(self)} whose states are cached")
        rows = self._rows[int(self._ends[index - 1]) if index else 0 : int(self._ends[index])]
        return rows if layers is None else of_layers(rows, self.about.layers, layers)

    def _map(self) -> Tensor:
        """[tokens, L * H]. Private to this process, as torch knows no tensor that is only to be read."""
        dtype = DTYPES[self.about.dtype]
        if not self._done:
            return torch.zeros(0, self.about.width, dtype=dtype)
        shape = int(self._ends[self._done - 1]), self.about.row_bytes
        return torch.from_numpy(np.memmap(self._file, np.uint8, "c", shape=shape)).view(dtype)


def default_layers(count: int) -> tuple[int, ...]:
    """Of a target of `count` layers: what an EAGLE-3 head reads (2503.01840, section 3.1: low, middle and
    high), and what the target's own head reads."""
    low, middle, high = min(2, count), count // 2, max(0, count - 3)
    return low, middle, high, count + 1


def read_layers(target: ModelRunner, asked: tuple[int, ...]) -> tuple[int, ...]:
    """Those that a head is to read, or the usual ones. Raises ConfigError for layers that the target has
    not."""
    layers = asked or default_layers(target.num_layers)[:-1]
    if not all(0 <= layer <= target.num_layers for layer in layers):
        raise ConfigError(f"layers {list(layers)}: the target has 0 to {target.num_layers}")
    return layers


def fill(
    folder: Path, corpus: Corpus, runner: ModelRunner, target: str, layers: Sequence[int] | None = None
) -> Iterator[int]:
    """Add the states of the documents that have none; yields how many have them, first and after each pass.

    It may stop at any time and goes on there: what is half written is cut off. Raises ConfigError for a
    folder of another target or without some of the layers, and for a document that the target cannot take.
    """
    wanted = default_layers(runner.num_layers) if layers is None else tuple(layers)
    wanted = _sharing(folder, wanted)
    runner.check_layers(wanted)
    about = _begin(folder, runner, wanted, target)
    _check_lengths(corpus, min(runner.max_model_len, runner.num_blocks * runner.block_size))
    done = _done(folder, about, corpus)
    with (folder / ROWS).open("ab") as file:
        file.truncate(about.row_bytes * int(corpus.ends[done - 1] if done else 0))
        yield done
        while done < len(corpus):
            group = _group(corpus, done, runner)
            for states in _passes(runner, [corpus.document(i)[0].tolist() for i in group], wanted):
                file.write(states.cpu().contiguous().view(torch.uint8).numpy().data)
            file.flush()
            done = group.stop
            yield done
    sync(folder / ROWS)


def check_known(folder: Path, corpus: Corpus) -> None:
    """Raises ConfigError for states of texts that are gone: others in their place would be given them."""
    rows = folder / ROWS
    if rows.is_file() and rows.stat().st_size > _read_about(folder).row_bytes * corpus.tokens:
        raise ConfigError(f"{folder} has states of texts that are gone: remove it and run again")


def _check_lengths(corpus: Corpus, limit: int) -> None:
    long = (index for index in range(len(corpus)) if corpus.length(index) > limit)
    if (index := next(long, None)) is not None:
        raise ConfigError(
            f"document {index} of the corpus has {corpus.length(index)} tokens and the target takes {limit}: "
            "write shorter ones"
        )


def _group(corpus: Corpus, first: int, runner: ModelRunner) -> range:
    """Documents from `first` on that fit into one pass; one that is longer gets passes of its own."""
    tokens = blocks = 0
    for index in range(first, len(corpus)):
        tokens += corpus.length(index)
        blocks += -(-corpus.length(index) // runner.block_size)
        if index > first and (tokens > PASS_TOKENS or blocks > runner.num_blocks):
            return range(first, index)
    return range(first, len(corpus))


def _passes(runner: ModelRunner, documents: Sequence[list[int]], layers: Sequence[int]) -> Iterator[Tensor]:
    """States [T, L * H] of whole documents one behind the other, in as many passes as it takes."""
    size = runner.block_size
    free = iter(range(runner.num_blocks))
    tables = [[next(free) for _ in range(-(-len(document) // size))] for document in documents]
    for start in range(0, max(len(document) for document in documents), PASS_TOKENS):
        rows = [
            Row(document[start : start + PASS_TOKENS], start, table, logits=0)
            for document, table in zip(documents, tables, strict=True)
        ]
        yield runner.forward_features(rows, layers)[1]


def _begin(folder: Path, runner: ModelRunner, layers: tuple[int, ...], target: str) -> About:
    """Say what the rows will be, or see that those which are there are the same."""
    one = torch.zeros(1, dtype=torch.int64, device=runner.device)
    width = len(layers) * runner.telling.embed(one).shape[-1]
    about = About(target, layers, width, str(runner.dtype).removeprefix("torch."))
    bind(folder / ABOUT, asdict(about))
    return about


def _sharing(folder: Path, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The layers whose states are there already, where all that are wanted are among them: heads that read
    fewer learn from them too."""
    known = _read_about(folder).layers if (folder / ABOUT).is_file() else ()
    return known if set(wanted) <= set(known) else wanted


def _read_about(folder: Path) -> About:
    if not (folder / ABOUT).is_file():
        raise ConfigError(f"{folder} holds no states of a target: fill it first")
    try:
        found = noted(folder / ABOUT)
        return About(**{**found, "layers": tuple(found["layers"])})
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{folder} says not what its states are: remove it and run again") from error


def _done(folder: Path, about: About, corpus: Corpus) -> int:
    """Documents whose rows are all there. A file that is only ever appended to is whole up to its end."""
    file = folder / ROWS
    rows = file.stat().st_size // about.row_bytes if file.is_file() else 0
    return bisect_right(corpus.ends, rows)
