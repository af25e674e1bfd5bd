"""What a prompt looks like: code, a text to summarize, or anything else, which is chat.

A cheap guess from the ends of the text, where instructions stand; drafters differ much between the three.
- summarize: it asks for a summary, or a long text ends or begins with a short ask about "the text above".
- code: a fence of Markdown, two words of programming in what it asks, or a quarter of its lines are code.
"""

from __future__ import annotations

import re
from typing import Literal

Look = Literal["chat", "code", "summarize"]

END = 1000  # characters that are read at each end
ASK = 300  # ... of which these may hold an instruction
LONG = 4000  # characters of a text that somebody may ask about
CODE_LINES = 0.25

SUMMARY = ("summarize", "summarise", "summary of", "tl;dr", "tldr", "key points", "main points")
WORD = re.compile(r"[a-z]+")
ABOUT_IT = frozenset(
    ("text", "article", "document", "passage", "report", "transcript", "paper", "above", "following")
)
LANGUAGES = frozenset(
    ("python", "javascript", "typescript", "java", "rust", "golang", "kotlin", "sql", "bash")
)
PROGRAMMING = LANGUAGES.union(
    ("regex", "function", "functions", "method", "class", "code", "script", "compiler", "refactor"),
    ("traceback", "debug", "algorithm"),
)
CODE_LINE = re.compile(  # how it begins, or how it ends
    r"(?:def|class|import|return|function|const|let|var|fn|func|public|private|#include) .*[:;({>]$"
    r"|(?:import|from) [\w.]+(?: import .*)?$|(?: {4}|\t)[ \t]*[\w@}#/.]|.*[;{}]$"
)


def detect(route: str, text: str | None) -> Look | None:
    """The look of a prompt's text; without one a chat is a chat, and of token ids nothing is known."""
    if text is None:
        return "chat" if route == "chat" else None
    asks = f"{text[:ASK]}\n{text[-ASK:]}".lower()
    if any(phrase in asks for phrase in SUMMARY) or (len(text) >= LONG and _asks_about_it(text)):
        return "summarize"
    return "code" if len(PROGRAMMING & _words(asks)) >= 2 or _has_code(text) else "chat"


def _words(text: str) -> frozenset[str]:
    return frozenset(WORD.findall(text))


def _asks_about_it(text: str) -> bool:
    """In a first or last paragraph that is short."""
    first, ends, _ = text[:ASK].partition("\n\n")
    _, begins, last = text[-ASK:].rpartition("\n\n")
    return bool(ABOUT_IT & _words(f"{first if ends else ''} {last if begins else ''}".lower()))


def _has_code(text: str) -> bool:
    ends = text if len(text) <= 2 * END else f"{text[:END]}\n{text[-END:]}"
    lines = [line.rstrip() for line in ends.split("\n") if line and not line.isspace()]
    return "```" in ends or sum(map(bool, map(CODE_LINE.match, lines))) > CODE_LINES * len(lines)
