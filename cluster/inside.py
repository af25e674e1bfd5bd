"""Drafters that live in the target's process wherever it is: all but models, and what they take there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gammaray.cluster.checkpoint import Checkpoint
from gammaray.config import Config
from gammaray.drafter_config import (
    WEIGHTLESS,
    Drafter,
    LayerExitDrafter,
    ModelDrafter,
)

Known = Mapping[str, Checkpoint]  # by what a configuration names


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes on the target's first GPU."""

    weights: int = 0
    kv: int = 0  # for as many tokens as the target's


def models(config: Config, drafter: Drafter) -> Iterator[str]:
    """Checkpoints of whole models that a drafter computes with."""
    for part in config.parts(drafter):
        if isinstance(part, ModelDrafter):
            yield part.model


def heads(config: Config, drafter: Drafter) -> Iterator[str]:
    """Checkpoints of what continues the target's own states."""
    for part in config.parts(drafter):
        if path := getattr(part, "path", None):
            yield path


def is_light(config: Config, drafter: Drafter) -> bool:
    """Whether it computes nothing on a GPU."""
    return all(part.method in WEIGHTLESS for part in config.parts(drafter))


def size(config: Config, drafter: Drafter, tokens: int, known: Known) -> Size:
    """Of one that is not a model. A part of a composite that is one is loaded here, too."""
    found = [_size(config, part, tokens, known) for part in config.parts(drafter)]
    return Size(sum(one.weights for one in found), sum(one.kv for one in found))


def _size(config: Config, drafter: Drafter, tokens: int, known: Known) -> Size:
    target: Checkpoint = known[config.target.model]
    dtype: str = getattr(drafter, "dtype", None) or config.target.dtype
    path: str | None = getattr(drafter, "path", None)
    if drafter.method in WEIGHTLESS:
        return Size()
    if isinstance(drafter, ModelDrafter):
        own = known[drafter.model]
        return Size(own.weights(dtype), tokens * own.kv_per_token(dtype))
    if isinstance(drafter, LayerExitDrafter):
        head = (target.hidden or 0) * (target.vocabulary or 0)
        return Size(Checkpoint(head).weights(dtype) if path else 0)
    if drafter.method == "mtp" or path is None:  # one more of the target's layers, in its file or in another
        weights = target.weights(dtype) // (target.layers or 1) if path else 0
        return Size(weights, tokens * target.one_layer.kv_per_token(dtype))
    own = known[path]
    layers = own if drafter.method == "dspark" else own.one_layer
    kv = 0 if drafter.method == "medusa" else tokens * layers.kv_per_token(dtype)
    return Size(own.weights(dtype), kv)
