"""YAML that says what it means: a key that appears twice is an error, and every error has one line."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from gammaray.errors import ConfigError

MERGE = "tag:yaml.org,2002:merge"


def read(text: str, source: str) -> object:
    """The plain tree in `text`. Raises ConfigError that names `source` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}:" if error.problem_mark else ""
        raise ConfigError(f"{source}:{line} {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from None


def read_file(file: Path, what: str) -> object:
    """The plain tree in a file. Raises ConfigError that says `what` could not be read."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read {what} {str(file)!r}: {reason}") from None
    return read(text, str(file))


def mapping(value: object, where: str) -> dict[str, Any]:
    """Raises ConfigError, that names `where`, unless it is one."""
    if isinstance(value, dict):
        return value
    raise ConfigError(f"{where}: expected a mapping")


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Hashable] = set()
        for key, _ in node.value:
            name = key.value if key.tag == MERGE else self.construct_object(key, deep=True)
            if not isinstance(name, Hashable):
                break  # the constructor below refuses it
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"key {name!r} appears twice", problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep=deep)
