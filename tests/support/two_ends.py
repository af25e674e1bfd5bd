"""Ends of a device link, each for a process of its own."""

from __future__ import annotations

from typing import Any

import torch

from gammaray.actors.features import FeatureLink, Shape
from gammaray.engine.ranks import Meeting, host, join


def keep(meeting: Meeting, shape: Shape, told: Any) -> None:
    """A worker: receives for ever, and tells each message's bytes, shape and counts."""
    torch.set_num_threads(1)
    link = FeatureLink(join(meeting, 1), shape)
    told.send("ready")
    while True:
        features, counts = link.receive()
        told.send((features.view(torch.uint8).numpy().tobytes(), tuple(features.shape), counts))


def deaf(meeting: Meeting, shape: Shape, told: Any) -> None:
    """A worker that takes nothing."""
    link = FeatureLink(join(meeting, 1), shape)
    told.send("ready")
    told.recv()
    link.close()


def endless(shape: Shape, told: Any) -> None:
    """A target: tells its meeting, then sends for ever."""
    torch.set_num_threads(1)
    seat = host(2)
    told.send(seat.meeting)
    link = FeatureLink(seat, shape)
    while True:
        link.send(torch.zeros(1, shape.width, dtype=shape.dtype), [1])
