"""Where `--out` writes. Files are tried before anything is measured, for that takes minutes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from gammaray.errors import ConfigError, GammarayError

SUFFIXES = (".json", ".md")


class Made(Protocol):
    """What a run found."""

    @property
    def failed(self) -> Sequence[str]:
        """What is wrong, a line each."""

    def as_json(self) -> dict[str, object]: ...

    def as_text(self) -> str: ...

    def as_markdown(self) -> str: ...


def check(files: Sequence[Path]) -> None:
    """Raises ConfigError for a file that `write` has no form for, or that cannot be written."""
    for file in files:
        if file.suffix not in SUFFIXES:
            raise ConfigError(f"--out writes {' and '.join(SUFFIXES)}, by the name; {file} is neither")
    for file in files:
        try:
            _try(os.path.realpath(file))  # behind a link, it is not the link that is made and removed
        except OSError as problem:
            raise ConfigError(f"--out {file}: {problem.strerror}") from None


def _try(file: str) -> None:
    there = os.path.lexists(file)
    with open(file, "a"):
        pass
    if not there:
        os.unlink(file)


def to_json(made: Made) -> str:
    return json.dumps(made.as_json(), indent=1)


def write(made: Made, files: Sequence[Path]) -> None:
    """Raises GammarayError for a file that can no longer be written."""
    for file in files:
        text = to_json(made) if file.suffix == ".json" else made.as_markdown()
        try:
            file.write_text(text + "\n")
        except OSError as problem:
            raise GammarayError(f"--out {file}: {problem.strerror}; the report was printed") from None
