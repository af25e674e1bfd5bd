"""Checkpoints that are there as a whole or not at all, whenever the process or the machine ends.

The newest two stay: should the disk spoil one, training goes on from the other.
"""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gammaray.errors import ConfigError
from gammaray.training.files import replacing

logger = logging.getLogger(__name__)

KEPT = 2
SUFFIX = ".pt"


def save(folder: Path, step: int, state: Mapping[str, Any]) -> Path:
    """`state`: tensors and plain values, by name. Returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:09d}{SUFFIX}"
    with replacing(path) as work:
        torch.save(dict(state), work)
    for old in _files(folder)[KEPT:]:
        old.unlink()
    return path


def newest(folder: Path) -> dict[str, Any] | None:
    """The state that was saved last and can be read; None where none was saved.

    Raises ConfigError when there are checkpoints and none of them can be read.
    """
    files = _files(folder)
    for path in files:
        try:
            return _read(path)
        except Exception as error:  # a damaged pickle raises what it likes
            logger.warning("%s cannot be read (%s)", path, type(error).__name__)
    if files:
        raise ConfigError(f"no checkpoint in {folder} can be read: remove the folder to begin again")
    return None


def _read(path: Path) -> dict[str, Any]:
    """Raises an exception for a file that is not as it was written; torch.load alone looks at no checksum."""
    with zipfile.ZipFile(path) as parts:
        if spoilt := parts.testzip():
            raise ValueError(f"{spoilt} is not what it was")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError("it is no state")
    return state


def _files(folder: Path) -> list[Path]:
    """The newest first."""
    return sorted(folder.glob(f"step-*{SUFFIX}"), reverse=True)
