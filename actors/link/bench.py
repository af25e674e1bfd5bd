"""What a draft costs to ask for: round trips over every transport of the draft link, in one run.

The transports take turns, trip by trip, so that a slow spell of the machine slows all of them. A trip is what
the engine waits for: packing the question, its way, the worker's reading and answering, the way back, and
reading the answer into trees. "in process" is a trip without a way.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version

import numpy as np

from gammaray.actors.link.bench_ends import HIDDEN, NAME, SECRET, TOP, VOCAB, WAYS, Open, Payload
from gammaray.actors.link.client import Limits, Link
from gammaray.actors.link.frames import Hello
from gammaray.actors.link.remote import RemoteDrafter
from gammaray.engine.bench.machine import machine
from gammaray.errors import ConfigError, GammarayError
from gammaray.types import MAX_TREE_NODES

WARM_UP = 10
PATIENCE_S = 60.0  # for a trip; a product's round would not wait so long
RAY = "Ray actor call"
FEATURES = "device, gloo, with features"
PACKAGES = ("gammaray", "torch", "ray", "numpy")


class Replica:
    """Asks for drafts of the same sequences again and again."""

    def __init__(self, transport: str, open: Open, payload: Payload) -> None:
        limits = Limits(patience_s=PATIENCE_S, least_s=PATIENCE_S, silence_s=PATIENCE_S)
        self._drafter = RemoteDrafter(Link(open, Hello(SECRET, VOCAB, NAME), limits), VOCAB)
        self._drafter.keep()
        self._transport, self._payload = transport, payload
        self._growth = [depth + 1 for depth in payload.depths]
        self._lengths = list(self._growth)
        for i, length in enumerate(self._lengths):
            self._drafter.catch_up(f"r{i}", range(length))

    def trip(self) -> float:
        """Seconds. Raises GammarayError when a draft does not come."""
        views = self._payload.views(self._lengths)
        began = time.perf_counter()
        drafts = self._drafter.collect(self._drafter.begin(views), math.inf)
        took = time.perf_counter() - began
        if [len(drafts.get(view.rid, ())) for view in views] != self._payload.depths:
            raise GammarayError(f"no whole answer over {self._transport!r}: is the machine out of memory?")
        for i, more in enumerate(self._growth):
            self._drafter.commit(f"r{i}", range(more))
            self._lengths[i] += more
        return took


def report(tokens: int, batch: int, repeats: int, with_ray: bool = True) -> dict[str, object]:
    """Raises ConfigError for a payload that no draft has, GammarayError when a transport fails."""
    if not 1 <= batch <= tokens <= batch * MAX_TREE_NODES:
        raise ConfigError(
            f"{tokens} tokens for {batch} sequences: give --tokens between --batch and --batch x "
            f"{MAX_TREE_NODES}, as each draft holds 1 to {MAX_TREE_NODES} tokens"
        )
    payload = Payload(tokens, batch)
    took = measure(payload, repeats, [name for name in WAYS if with_ray or name != RAY])
    return {
        "machine": machine(),
        "versions": versions(),
        "payload": described(payload),
        "rows": [{"transport": name, **summary(seconds)} for name, seconds in took.items()],
        "skipped": [] if with_ray else [{"transport": RAY, "reason": "left out by --no-ray"}],
    }


def measure(payload: Payload, repeats: int, transports: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of each trip, by transport."""
    with ExitStack() as stack:
        # All workers first: one that is connected and hears nothing while others start would hang up.
        opens = {name: stack.enter_context(WAYS[name](payload)) for name in transports}
        replicas = {name: Replica(name, open, payload) for name, open in opens.items()}
        rounds = [
            {name: replica.trip() for name, replica in replicas.items()} for _ in range(WARM_UP + repeats)
        ]
    return {name: [trips[name] for trips in rounds[WARM_UP:]] for name in transports}


def summary(seconds: Sequence[float]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(np.array(seconds) * 1e6, [50, 90, 99]).round(1).tolist()
    return {"p50_us": p50, "p90_us": p90, "p99_us": p99, "n": len(seconds)}


def described(payload: Payload) -> dict[str, object]:
    """Exactly what goes both ways."""
    return {
        "tokens": payload.tokens,
        "batch": payload.batch,
        "question_bytes": payload.question_bytes,
        "answer_bytes": payload.answer_bytes,
        "features_bytes": payload.features_bytes,
        "question": f"a DRAFT frame: the new tokens of {payload.batch} sequences (each draft's and one more, "
        "4 bytes each), and what is asked for each",
        "answer": f"a TREES frame: {payload.tokens} drafted tokens, each with its top-{TOP} q "
        f"({TOP} ids of 4 bytes, {TOP} float32)",
        "features": f"{payload.tokens} x {HIDDEN} bfloat16 beside the question, only over {FEATURES!r}",
    }


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def as_text(found: dict[str, object]) -> str:
    """A table, and what was measured."""
    payload, rows, skipped = found["payload"], found["rows"], found["skipped"]
    assert isinstance(payload, dict) and isinstance(rows, list) and isinstance(skipped, list)
    lines = [f"{'transport':<28}{'p50 us':>9}{'p90 us':>9}{'p99 us':>9}{'n':>7}"]
    lines += [
        f"{r['transport']:<28}{r['p50_us']:>9.0f}{r['p90_us']:>9.0f}{r['p99_us']:>9.0f}{r['n']:>7}"
        for r in rows
    ]
    lines += [f"{entry['transport']:<28}{entry['reason']}" for entry in skipped]
    sides = ("question", "answer", "features")
    lines += [f"{side + ':':<10}{payload[f'{side}_bytes']:>9} bytes, {payload[side]}" for side in sides]
    lines += [f"{name + ':':<10}{_listed(found[name])}" for name in ("machine", "versions")]
    return "\n".join(lines)


def _listed(entries: object) -> str:
    assert isinstance(entries, dict)
    return ", ".join(f"{name} {value}" for name, value in entries.items())
