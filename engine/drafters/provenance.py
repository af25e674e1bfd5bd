"""A head that was made for one target is not loaded beside another: see gammaray/papers.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gammaray import papers
from gammaray.engine import identity
from gammaray.engine.drafters.head_loading import folder_of
from gammaray.errors import ConfigError
from gammaray.papers import Papers


def folder(config: Any) -> Path | None:
    """Where the drafter of this entry of `drafters` has weights of its own; None: it has none, or is a whole
    model. Raises ConfigError."""
    place = getattr(config, "path", None)
    return None if place is None else folder_of(place)


def check_target(name: str, config: Any, model: str) -> None:
    """Raises ConfigError for a drafter that says that it was made for other weights than those of `model`.

    Whether it has a report is for whoever lets it answer requests (routing/registry.py).
    """
    place = folder(config)
    if place is None or (made := papers.made_for(place)) is None:
        return
    here = identity.of(model)
    if reason := papers.refusal(f"drafter {name!r}", Papers(made), here, config.path, model):
        raise ConfigError(reason)


def refused(name: str, config: Any, model: str) -> str:
    """Why it must not answer requests; empty: it may. Raises ConfigError."""
    place = folder(config)
    found = None if place is None else papers.read(place)
    if found is None:
        return ""
    return papers.refusal(f"drafter {name!r}", found, identity.of(model), config.path, model)
