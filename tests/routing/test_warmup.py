"""Synthetic conversations: each kind looks like what it is, and a seed decides them."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from gammaray.routing.detect import detect
from gammaray.routing.warmup import KINDS, Conversation, Kind, conversations


def text(conversation: Conversation) -> str:
    return "\n\n".join(content for _, content in conversation.messages)


def test_a_seed_decides_them_and_kinds_take_turns() -> None:
    first = list(conversations(40, seed=1))
    assert first == list(conversations(40, seed=1)) != list(conversations(40, seed=2))
    assert first[:10] == list(islice(conversations(40, seed=1), 10))
    assert Counter(one.kind for one in first) == dict.fromkeys(KINDS, 10)
    assert {one.kind for one in conversations(5, 1, ("code",))} == {"code"}
    assert list(conversations(0, 1)) == []


@pytest.mark.parametrize("kind", ["chat", "code", "summarize"])
def test_the_detector_of_classes_sees_them_as_what_they_are(kind: Kind) -> None:
    looks = Counter(detect("chat", text(one)) for one in conversations(200, 3, (kind,)))
    assert looks[kind] == 200, looks


def test_they_differ_and_are_ready_for_an_answer() -> None:
    made = list(conversations(400, seed=5))
    assert len({text(one) for one in made}) > 340
    assert {one.messages[-1][0] for one in made} == {"user"}
    assert any(len(one.messages) == 3 for one in made), "some go on after a first answer"
    assert all("{" not in text(one) for one in made), "every template is filled in"


def test_edits_repeat_their_prompt() -> None:
    """The answer is in the prompt: what an n-gram drafter lives on."""
    for one in conversations(20, 7, ("edit",)):
        assert len(text(one)) > 200
