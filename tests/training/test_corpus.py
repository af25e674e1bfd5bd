"""Shards of a corpus, and what is left of one that was being written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gammaray.errors import ConfigError
from gammaray.training.corpus import Corpus, Document, seal
from gammaray.training.files import replacing

DOCUMENTS = [
    Document.answered((1, 2, 3), (70_000, 5)),
    Document.answered((), (6,)),
    Document.answered((7, 8), (9, 10, 11)),
    Document.answered((12,), (5, 5)),
]


def test_documents_keep_their_numbers_and_marks_over_shards(tmp_path: Path) -> None:
    """Ends are counted within a shard: a base that is forgotten or added twice gives other documents."""
    assert len(Corpus.open(tmp_path / "none")) == 0
    for part in (DOCUMENTS[:2], [], DOCUMENTS[2:3], DOCUMENTS[3:]):
        seal(tmp_path, part)
    corpus = Corpus.open(tmp_path)
    found = [tuple(tuple(x.tolist()) for x in corpus.document(i)) for i in range(len(corpus))]
    assert found == [(document.tokens, document.answers) for document in DOCUMENTS]
    assert (corpus.tokens, corpus.ends.tolist()) == (14, [5, 6, 11, 14])
    assert [corpus.length(i) for i in range(4)] == [5, 1, 5, 3]
    with pytest.raises(IndexError):
        corpus.document(-1)


def test_only_what_the_target_wrote_is_counted(tmp_path: Path) -> None:
    seal(tmp_path, DOCUMENTS[2:])
    assert Corpus.open(tmp_path).counts(13).nonzero().flatten().tolist() == [5, 9, 10, 11]
    assert int(Corpus.open(tmp_path).counts(13)[5]) == 2


def test_a_shard_that_was_being_written_is_none(tmp_path: Path) -> None:
    """A half shard that counts would shift what every later shard, and every cached state, stands for."""
    seal(tmp_path, DOCUMENTS[:1])
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "000001") as work:
        work.mkdir()
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["000000"]
    (tmp_path / ".000001.part").mkdir()  # of a process that was killed
    (tmp_path / ".000001.part" / "ends.i64").write_bytes(b"half")
    assert len(Corpus.open(tmp_path)) == 1
    seal(tmp_path, DOCUMENTS[1:2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000", "000001"]
    assert Corpus.open(tmp_path).document(1)[0].tolist() == [6]


def test_tokens_that_the_target_has_not_are_damage(tmp_path: Path) -> None:
    seal(tmp_path, DOCUMENTS[:2])
    with pytest.raises(ConfigError, match="shard 000000 is damaged"):
        Corpus.open(tmp_path).counts(70_000)


@pytest.mark.parametrize("spoil", ["answers", "ends", "lost"])
def test_a_damaged_corpus_is_refused(tmp_path: Path, spoil: str) -> None:
    seal(tmp_path, DOCUMENTS[:2])
    seal(tmp_path, DOCUMENTS[2:])
    if spoil == "answers":
        (tmp_path / "000001" / "answers.u8").write_bytes(b"\1" * 7)
    elif spoil == "ends":
        np.asarray([5, 5, 8]).tofile(tmp_path / "000001" / "ends.i64")
    else:
        (tmp_path / "000000").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"run again"):
        Corpus.open(tmp_path)
