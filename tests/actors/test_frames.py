"""Frames survive the way there, and what is no frame is said to be none."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gammaray.actors.link.frames import (
    Asked,
    Change,
    Hello,
    Kind,
    MalformedFrame,
    Reader,
    Trees,
    Update,
    pack_draft,
    pack_hello,
    pack_text,
    pack_trees,
    read_draft,
    read_hello,
    read_trees,
)
from gammaray.engine.drafters.base import DraftTree, DraftView
from gammaray.types import SamplingParams

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=20).map(tuple)
handles = st.integers(0, 2**32 - 1)
updates = st.builds(
    Update,
    change=st.sampled_from(Change),
    handle=handles,
    length=st.integers(0, 2**31),
    tokens=tokens,
    salt=st.binary(max_size=20),
)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 1000),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
)
views = st.builds(
    DraftView,
    rid=st.just(""),
    length=st.integers(1, 2**31),
    depth=st.integers(1, 16),
    width=st.integers(1, 8),
    sampling=sampling,
    sequence=st.integers(0, 100),
    coupled=st.booleans(),
)
asked = st.builds(Asked, handle=handles, view=views)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    count = draw(st.integers(1, 64))
    ids = st.integers(0, 2**31 - 1)
    nodes = tuple(draw(ids) for _ in range(count))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(count))
    confidence = draw(st.none() | st.just(tuple(0.5 for _ in nodes)))
    if draw(st.booleans()):
        return DraftTree(nodes, parents, confidence=confidence)
    q_ids = torch.randint(0, 2**31 - 1, (count, 3))
    return DraftTree(nodes, parents, "iid", q_ids, torch.rand(count, 3), confidence)


def parts(tree: DraftTree) -> object:
    q = None if tree.q_ids is None or tree.q_probs is None else (tree.q_ids.tolist(), tree.q_probs.tolist())
    return tree.tokens, tree.parents, tree.drawn, q, tree.confidence


@given(st.lists(updates, max_size=4), st.lists(asked, max_size=4), st.integers(0, 2**32 - 1))
def test_questions_arrive_as_they_were_asked(
    changes: list[Update], questions: list[Asked], generation: int
) -> None:
    reader = Reader(pack_draft(generation, 2**40, changes, questions))
    assert (reader.kind, reader.generation, reader.number) == (Kind.DRAFT, generation, 2**40)
    assert read_draft(reader) == (changes, questions)


@given(st.dictionaries(handles, st.tuples(st.integers(1, 2**31), trees()), max_size=3), tokens)
def test_drafts_arrive_as_they_were_made(
    found: dict[int, tuple[int, DraftTree]], stale: tuple[int, ...]
) -> None:
    read = read_trees(Reader(pack_trees(1, 2, Trees(found, stale, 3))))
    assert (read.stale, read.hits) == (stale, 3)
    assert {h: (n, parts(t)) for h, (n, t) in read.trees.items()} == {
        h: (n, parts(t)) for h, (n, t) in found.items()
    }


def test_greetings_arrive() -> None:
    hello = Hello(b"\x00secret", 49152, "smäll")
    assert read_hello(Reader(pack_hello(hello, 3))) == hello
    assert Reader(pack_text(Kind.REFUSED, 0, 0, "because")).raw() == b"because"


@given(st.binary(max_size=200), st.data())
def test_whatever_comes_is_read_or_refused(noise: bytes, data: st.DataObject) -> None:
    """Random bytes, and frames that were cut or changed: nothing but MalformedFrame."""
    view = DraftView("", 3, 2, 1, SamplingParams(), 0)
    q = torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]])
    good = [
        pack_draft(1, 2, [Update(Change.BEGIN, 1, 0, (1, 2, 3), b"t")], [Asked(1, view)]),
        pack_trees(1, 2, Trees({1: (3, DraftTree((4,), (-1,), "iid", *q))}, (2,), 1)),
        pack_hello(Hello(b"s", 10, "d"), 0),
    ]
    frame = bytearray(data.draw(st.sampled_from(good)))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at : at + len(noise)] = noise
    for candidate in (noise, bytes(frame), bytes(frame[:at])):
        for read in (read_draft, read_trees, read_hello):
            with contextlib.suppress(MalformedFrame):
                read(Reader(candidate))


def test_a_frame_that_ends_early_is_none() -> None:
    frame = pack_hello(Hello(b"secret", 10, "small"), 0)
    with pytest.raises(MalformedFrame):
        read_hello(Reader(frame[:-1]))
