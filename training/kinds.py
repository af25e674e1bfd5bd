"""Heads that can be made anew from what their run noted, by the method that it noted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from gammaray.errors import ConfigError
from gammaray.training import block_command, eagle3_command
from gammaray.training.block_command import Block, Medusa
from gammaray.training.command import Asked, Kind
from gammaray.validation import explain, path

T = TypeVar("T")
Known = Mapping[str, Any]  # run.json


def noted(cls: type[T], known: Known, **given: Any) -> T:
    """A dataclass of what was noted of it, and of what is `given`. Raises ConfigError."""
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    values = {name: value for name, value in known.items() if name in names}
    try:
        return TypeAdapter(cls).validate_python(values | given)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"run.json: {path(first)}: {explain(first)}") from None


def _eagle3(asked: Asked, known: Known) -> Kind:
    return eagle3_command.kind(asked, noted(eagle3_command.Sizes, known))


def _medusa(asked: Asked, known: Known) -> Kind:
    return block_command.medusa(noted(Medusa, known))


def _dspark(asked: Asked, known: Known) -> Kind:
    if "confidence_of" in known:
        raise ConfigError("only its confidence head was trained here: refresh the drafter that it is of")
    return block_command.block(asked, noted(Block, known))


KINDS: Mapping[str, Callable[[Asked, Known], Kind]] = {
    "eagle3": _eagle3,
    "medusa": _medusa,
    "dspark": _dspark,
}
