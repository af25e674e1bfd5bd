"""Synthetic conversations that warm a tenant's drafters and caches up: no text of anybody's is in them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal, get_args

Kind = Literal["chat", "code", "summarize", "edit"]
KINDS: tuple[Kind, ...] = get_args(Kind)

PLACES = ("the harbour", "a mountain village", "the old library", "the night train", "a small airport")
PEOPLE = ("a retired teacher", "two engineers", "the new mayor", "a group of students", "an apprentice")
THINGS = ("a repair plan", "the weekly menu", "a bicycle", "the water supply", "a photo archive", "a garden")
DEEDS = ("finished", "lost", "redesigned", "argued about", "paid for", "wrote down", "postponed", "tested")
TIMES = ("in early spring", "on Tuesday", "after the storm", "before sunrise", "for three weeks", "last year")
RESULTS = ("it cost less than planned", "nobody had expected it", "the work began anew", "all were pleased")
QUESTIONS = (
    "What should I know about {thing} before I begin?",
    "Give me five ideas for {thing} near {place}.",
    "Explain to {person} why {thing} matters, in plain words.",
    "Tell me a short story about {person} and {thing} at {place}.",
    "Compare two ways to take care of {thing}.",
)
FOLLOW_UPS = ("Why is that?", "Can you give an example?", "And what if time is short?")
LANGUAGES = ("Python", "JavaScript", "Go", "Rust", "Java")
TASKS = (
    "Write the code of a {language} function that {job}, and a short test.",
    "Explain what this {language} function does, then make it faster:\n\n{snippet}",
    "Find the bug in this code and show the corrected function:\n\n{snippet}",
)
JOBS = ("merges two sorted lists", "counts the words of a file", "parses a date", "finds cycles in a graph")
NAMES = ("total", "count", "items", "price", "index", "weight", "length", "score")
SNIPPET = """\
def {f}({a}, {b}):
    {r} = 0
    for {i} in range(len({a})):
        if {a}[{i}] > {b}:
            {r} += {a}[{i}] * {number}
    return {r}
"""
EDITS = (
    "Replace every mention of {old} by {new} and repeat the rest word for word:\n\n{text}",
    "Correct the style of this note, changing as little as you can:\n\n{text}",
    "Turn this note into a list with one line for each sentence:\n\n{text}",
)
ASKS = ("Summarize this report in three sentences:", "What are the key points of the following text?")


@dataclass(frozen=True, slots=True)
class Conversation:
    """`messages` as (role, content), ready for the assistant's answer."""

    kind: Kind
    messages: tuple[tuple[str, str], ...]


def conversations(n: int, seed: int, kinds: Sequence[Kind] = KINDS) -> Iterator[Conversation]:
    """`n` of them, in turn of each kind; the same for the same seed."""
    draw = random.Random(seed)
    make = {"chat": _chat, "code": _code, "summarize": _summarize, "edit": _edit}
    for kind in islice(cycle(kinds), n):
        yield Conversation(kind, make[kind](draw))


def _asked(text: str) -> tuple[tuple[str, str], ...]:
    return (("user", text),)


def _chat(draw: random.Random) -> tuple[tuple[str, str], ...]:
    """Every third one goes on after a first answer."""
    question = draw.choice(QUESTIONS).format(
        thing=draw.choice(THINGS), place=draw.choice(PLACES), person=draw.choice(PEOPLE)
    )
    if draw.random() > 1 / 3:
        return _asked(question)
    return (("user", question), ("assistant", _text(draw, 3)), ("user", draw.choice(FOLLOW_UPS)))


def _code(draw: random.Random) -> tuple[tuple[str, str], ...]:
    names = dict(zip("fabri", draw.sample(NAMES, 5), strict=True))
    snippet = SNIPPET.format(**names, number=draw.randrange(2, 100))
    language, job = draw.choice(LANGUAGES), draw.choice(JOBS)
    return _asked(draw.choice(TASKS).format(language=language, job=job, snippet=snippet))


def _summarize(draw: random.Random) -> tuple[tuple[str, str], ...]:
    return _asked(f"{draw.choice(ASKS)}\n\n{_text(draw, draw.randrange(10, 30))}")


def _edit(draw: random.Random) -> tuple[tuple[str, str], ...]:
    old, new = draw.sample(PEOPLE, 2)
    return _asked(draw.choice(EDITS).format(old=old, new=new, text=_text(draw, draw.randrange(4, 10))))


def _text(draw: random.Random, sentences: int) -> str:
    return " ".join(_sentence(draw) for _ in range(sentences))


def _sentence(draw: random.Random) -> str:
    start = f"{draw.choice(TIMES)} {draw.choice(PEOPLE)} {draw.choice(DEEDS)} {draw.choice(THINGS)}"
    return f"{start[0].upper()}{start[1:]} at {draw.choice(PLACES)}, and {draw.choice(RESULTS)}."
