"""What `gammaray train layer-search` says: a table, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gammaray.engine.bench.machine import machine
from gammaray.errors import ConfigError
from gammaray.kernels.bench.report import table
from gammaray.training.curve import png
from gammaray.training.files import replacing
from gammaray.training.layers import NEAR, Exit, Wanted, pick, search

HEAD = ("layers", "alpha", "draft latency", "depth", "tau", "predicted speed-up")
NAMES = ("layers.json", "layers.png")


@dataclass(frozen=True, slots=True)
class Result:
    target: str
    exits: Sequence[Exit]

    @property
    def picked(self) -> Exit:
        return pick(self.exits)

    def as_json(self) -> dict[str, object]:
        return {
            "target": self.target,
            "machine": machine(),
            "exits": [asdict(one) for one in self.exits],
            "picked": self.picked.layers,
        }

    def as_text(self) -> str:
        one = self.picked
        said = (
            f"{one.layers} layers: the earliest within {NEAR:.2f}x of the best, {one.speedup:.2f}x predicted"
        )
        if one.speedup <= 1:
            said = f"no exit is faster than plain decoding; the best is {one.speedup:.2f}x"
        name = f"drafters: {{exit: {{method: layer_exit, layers: {one.layers}}}}}, at depth {one.gamma}"
        return "\n".join([*table(HEAD, map(_cells, self.exits)), "", said, *[name] * (one.speedup > 1)])


def run(wanted: Wanted, out: Path | None, say: Callable[[str], None] = lambda line: None) -> Result:
    """Search, and write layers.json and layers.png into `out`. Raises ConfigError."""
    _check(out)
    found = Result(wanted.target, search(wanted, lambda one: say(" | ".join(_cells(one)))))
    if out is not None:
        text = json.dumps(found.as_json(), indent=1) + "\n"
        files = text.encode(), png(wanted.target, found.exits, found.picked)
        for name, data in zip(NAMES, files, strict=True):
            with replacing(out / name) as work:
                work.write_bytes(data)
    return found


def _check(out: Path | None) -> None:
    """Before anything is measured."""
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {out}: {error.strerror}") from None


def _cells(one: Exit) -> tuple[str, ...]:
    return (
        str(one.layers),
        f"{one.alpha:.2f}",
        f"{one.latency:.0%}",
        str(one.gamma),
        f"{one.tau:.2f}",
        f"{one.speedup:.2f}",
    )
