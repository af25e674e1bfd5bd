"""A Dockerfile as its builder reads it: instructions with their variables filled in, by stage."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

FILLED = {
    "FROM",
    "COPY",
    "ENV",
    "LABEL",
    "USER",
    "WORKDIR",
    "EXPOSE",
}  # elsewhere the shell fills variables in
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
KNOWN = FILLED | {"ARG", "RUN", "ENTRYPOINT", "CMD"}


@dataclass(frozen=True)
class Step:
    """One instruction. `flags` are its own: `--mount=...` of RUN, `--from=...` of COPY."""

    word: str
    rest: str
    flags: tuple[str, ...]
    environment: Mapping[str, str]  # that holds when it runs
    folder: str  # that it runs in

    @property
    def arguments(self) -> list[str]:
        return json.loads(self.rest) if self.rest.startswith("[") else shlex.split(self.rest)


@dataclass
class Stage:
    base: str
    name: str | None
    steps: list[Step] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"

    def last(self, word: str) -> Step | None:
        return next((step for step in reversed(self.steps) if step.word == word), None)


def stages(file: Path) -> list[Stage]:
    """Raises AssertionError for what this reader does not know, so that no test passes over it."""
    found: list[Stage] = []
    arguments: dict[str, str] = {}  # of before the first FROM
    for word, flags, rest in _instructions(file.read_text()):
        assert word in KNOWN, f"{file.name}: {word} is unknown to this reader"
        if word == "ARG":
            assert not found, f"{file.name}: only the base is an argument"
            name, _, value = rest.partition("=")
            arguments[name] = value
        elif word == "FROM":
            base, _, name = _filled(rest, arguments).partition(" AS ")
            found.append(Stage(base, name or None))
        else:
            _add(found[-1], word, flags, rest)
    return found


def _add(stage: Stage, word: str, flags: tuple[str, ...], rest: str) -> None:
    rest = _filled(rest, stage.environment) if word in FILLED else rest
    if word == "ENV":
        stage.environment |= dict(_pair(part) for part in shlex.split(rest))
    elif word == "WORKDIR":
        assert rest.startswith("/"), "a path from the root tells where it is"
        stage.folder = rest
    stage.steps.append(Step(word, rest, flags, dict(stage.environment), stage.folder))


def _instructions(text: str) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Comments go, also between continued lines; a backslash at the end of a line joins it with the next."""
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        word, _, rest = line.strip().partition(" ")
        flags = re.match(r"(?:\s*--[a-z]+=\S+)*", rest)
        assert flags is not None
        yield word.upper(), tuple(flags[0].split()), rest[flags.end() :].strip()


def _filled(text: str, values: Mapping[str, str]) -> str:
    return VARIABLE.sub(lambda match: values.get(match[1] or match[2], match[0]), text)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    assert equals, f"write ENV {name}=VALUE"
    return name, value
