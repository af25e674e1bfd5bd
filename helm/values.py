"""The chart's values.yaml with its comments: one tree, from which schema and README are made.

# -- what the value below is           (goes on in further lines that begin with #)
key: default
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

DOC = re.compile(r"# -- (.*)")
COMMENT = re.compile(r"# ?(.*)")


@dataclass(frozen=True)
class Value:
    """`text` is the comment of a value; `heading` that of a group of values, which has no `--`."""

    path: tuple[str, ...]
    default: Any
    text: str
    heading: str
    children: tuple[Value, ...]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def is_group(self) -> bool:
        """A part of the chart's own vocabulary; else a value, whatever lies in it."""
        return not self.text and bool(self.children)

    @property
    def is_documented_below(self) -> bool:
        return any(self.documented())

    def documented(self) -> Iterator[Value]:
        """Every value below that has a comment, in the order of the file."""
        for child in self.children:
            if child.text:
                yield child
            yield from child.documented()


def parse(text: str) -> Value:
    """Raises ValueError when a value has no comment, neither of its own nor above it."""
    lines = text.splitlines()
    root = _value((), yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text), lines, "")
    if bare := [value.name for value in _bare(root)]:
        raise ValueError(f"values.yaml: no comment that begins with '# --' tells of {', '.join(bare)}")
    return root


def _value(path: tuple[str, ...], node: Any, default: Any, lines: list[str], comment: str) -> Value:
    doc = DOC.fullmatch(comment)
    children: tuple[Value, ...] = ()
    if isinstance(node, yaml.MappingNode):
        children = tuple(
            _value((*path, key.value), value, default[key.value], lines, _above(lines, key.start_mark))
            for key, value in node.value
        )
    return Value(path, default, doc[1] if doc else "", "" if doc else comment, children)


def _above(lines: list[str], key: yaml.Mark) -> str:
    """The comment just above a key that begins its line, as one line; its last part that begins with `--`."""
    if lines[key.line][: key.column].strip():
        return ""
    found: list[str] = []
    for line in reversed(lines[: key.line]):
        if not (comment := COMMENT.fullmatch(line.strip())):
            break
        if DOC.fullmatch(line.strip()):
            return " ".join([line.strip(), *found])
        found.insert(0, comment[1])
    return " ".join(found)


def _bare(value: Value) -> Iterator[Value]:
    if value.text:
        return
    if not value.children:
        yield value
    for child in value.children:
        yield from _bare(child)
