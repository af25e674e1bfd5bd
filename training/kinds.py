"""Heads that can be made anew from what their run noted, by the method that it noted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from gammaray.errors import ConfigError
from gammaray.training import block_command, eagle3_command
from gammaray.training.block_command import Block, Medusa
from gammaray.training.command import Asked, Kind
from gammaray.training.dspark import Sizes

Known = Mapping[str, Any]  # run.json


def noted(cls: type, known: Known, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Of the fields of a dataclass those that were noted. JSON has lists for tuples."""
    names = {field.name for field in fields(cls)} - {*without}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in known.items()
        if name in names
    }


def _eagle3(asked: Asked, known: Known) -> Kind:
    return eagle3_command.kind(asked, eagle3_command.Sizes(**noted(eagle3_command.Sizes, known)))


def _medusa(asked: Asked, known: Known) -> Kind:
    return block_command.medusa(Medusa(**noted(Medusa, known)))


def _dspark(asked: Asked, known: Known) -> Kind:
    if "confidence_of" in known:
        raise ConfigError("only its confidence head was trained here: refresh the drafter that it is of")
    sizes = Sizes(**noted(Sizes, known["sizes"]))
    return block_command.block(asked, Block(**noted(Block, known, without=("sizes",)), sizes=sizes))


KINDS: Mapping[str, Callable[[Asked, Known], Kind]] = {
    "eagle3": _eagle3,
    "medusa": _medusa,
    "dspark": _dspark,
}
