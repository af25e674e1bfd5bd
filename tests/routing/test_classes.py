"""Which class a request belongs to, and what its prompt looks like."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.config import Class, Tenant, When
from gammaray.routing.classes import classify
from gammaray.routing.detect import LONG, detect
from gammaray.types import Asked

PYTHON = """def add(a, b):
    total = a + b
    return total


class Point:
    def __init__(self, x):
        self.x = x
"""
PROSE = "It was a bright cold day in April, and the clocks were striking thirteen.\n"


def name(when: When, **asked: object) -> str | None:
    found = classify(Tenant(classes=[Class(name="k", when=when)]), Asked("r", "t", **asked))  # type: ignore[arg-type]
    return found.name if found else None


@pytest.mark.parametrize(
    ("when", "inside", "outside"),
    [
        (When(prompt_tokens_over=3), {"prompt": (1,) * 4}, {"prompt": (1,) * 3}),
        (When(prompt_tokens_below=3), {"prompt": (1,) * 2}, {"prompt": (1,) * 3}),
        (When(temperature_over=0.5), {"temperature": 0.6}, {"temperature": 0.5}),
        (When(temperature_below=0.5), {"temperature": 0.0}, {"temperature": 0.5}),
        (When(route="chat"), {"route": "chat"}, {"route": "completions"}),
        (When(header={"X-Kind": "a"}), {"headers": {"x-kind": "a"}}, {"headers": {"x-kind": "A"}}),
        (When(header={"x-kind": "a"}), {"headers": {"x-kind": "a", "b": "c"}}, {}),
        (When(looks_like="code"), {"text": PYTHON}, {"text": PROSE}),
        (When(looks_like="chat"), {"text": PROSE}, {"text": None}),
        (When(looks_like="chat"), {"route": "chat"}, {"text": PYTHON, "route": "chat"}),
    ],
)
def test_conditions(when: When, inside: dict, outside: dict) -> None:
    assert name(when, **inside) == "k"
    assert name(when, **outside) is None


def test_all_that_is_set_must_hold() -> None:
    when = When(route="chat", temperature_over=0.5)
    assert name(when, route="chat", temperature=0.7) == "k"
    assert name(when, route="chat", temperature=0.2) is None
    assert name(when, temperature=0.7) is None
    assert name(When()) == "k"


def test_the_first_that_fits() -> None:
    classes = [
        Class(name="long", when=When(prompt_tokens_over=5)),
        Class(name="code", when=When(looks_like="code")),
        Class(name="summary", when=When(looks_like="summarize")),
        Class(name="rest"),
    ]
    tenant = Tenant(classes=classes)

    def of(**asked: object) -> str | None:
        found = classify(tenant, Asked("r", "t", **asked))  # type: ignore[arg-type]
        return found.name if found else None

    assert of(prompt=(1,) * 6, text=PYTHON) == "long"
    assert of(prompt=(1,) * 5, text=PYTHON) == "code"
    assert of(text="Summarize: x") == "summary"
    assert of() == "rest"
    assert classify(Tenant(), Asked("r", "t")) is None


@pytest.mark.parametrize(
    ("look", "text"),
    [
        ("code", PYTHON),
        ("code", "int main(void) {\n  printf(1);\n  return 0;\n}"),
        ("code", "What is wrong here?\n\n```\nx = 1\n```"),
        ("code", "Write a Python function that reverses a list."),
        ("code", PROSE * 100 + "\n\nNow write me a bash script for it."),
        ("code", PYTHON * 500),
        ("summarize", "Summarise this: " + PROSE),
        ("summarize", PROSE * 100 + "\nTL;DR:"),
        ("summarize", "Give me the key points.\n\n" + PYTHON * 100),
        ("summarize", PROSE * (LONG // len(PROSE) + 1) + "\n\nWho is named in the text above?"),
        ("chat", PROSE * (LONG // len(PROSE) + 1) + "\n\nAnd what do you think?"),
        ("chat", "Who is named in the text above?"),
        ("chat", "Tell me about the code of Hammurabi."),
        ("chat", PROSE),
        ("chat", PROSE * 100 + "Please summarize it. " + PROSE * 100),  # in the middle nobody asks
        ("chat", ""),
        ("chat", "- one\n- two\n- three\n"),
        ("chat", "  \n\t\n"),
    ],
)
def test_looks(look: str, text: str) -> None:
    assert detect("completions", text) == detect("chat", text) == look


def test_token_ids_say_nothing() -> None:
    assert detect("completions", None) is None
    assert detect("chat", None) == "chat"


@given(st.text(max_size=5000))
def test_any_text_has_a_look(text: str) -> None:
    assert detect("chat", text) in ("chat", "code", "summarize")
