"""A curve of layers against acceptance and speed, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

from matplotlib.figure import Figure

from gammaray.training.layers import Exit

INCHES = 7.6, 4.0
ALPHA, SPEED = "#5665b8", "#c2571a"


def png(target: str, exits: Sequence[Exit], picked: Exit) -> bytes:
    """`exits` ascending. Alpha has the axis on the left, from 0 to 1, the predicted speed-up that on the
    right, from 0."""
    figure = Figure(INCHES, layout="constrained")
    left = figure.subplots()
    right = left.twinx()
    layers = [one.layers for one in exits]
    left.plot(layers, [one.alpha for one in exits], "o-", color=ALPHA)
    right.plot(layers, [one.speedup for one in exits], "s-", color=SPEED)
    left.axvline(picked.layers, color="grey", linestyle="--")
    left.set_xticks(layers)
    left.set_ylim(0, 1)
    right.set_ylim(0, 1.05 * max(1.0, *(one.speedup for one in exits)))
    left.set_xlabel("layers that draft")
    left.set_ylabel("alpha", color=ALPHA)
    right.set_ylabel("predicted speed-up", color=SPEED)
    note = f"{picked.layers} layers: alpha {picked.alpha:.2f}, predicted speed-up {picked.speedup:.2f}"
    left.set_title(f"Layer exit of {target}\n{note}", fontsize="medium")
    written = BytesIO()
    figure.savefig(written, format="png", dpi=120)
    return written.getvalue()
