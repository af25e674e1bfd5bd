"""The real HTTP application and engine over a tiny random model, without Ray: `tiny_server.py PORT`.

Serves until SIGTERM, then prints one line of JSON: how many requests it answered with which status, the
slowest answer in seconds, KV blocks still held by the target and by drafters, and whether the engine is idle.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import uvicorn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.checkpoint import EOS, byte_tokenizer, save_checkpoint

from gammaray.actors.target import ReplicaSettings, TargetReplica
from gammaray.api.app import create_app
from gammaray.config import Config, parse
from gammaray.engine.build import build_engine
from gammaray.engine.engine import Engine
from gammaray.engine.service import AsyncEngine
from gammaray.routing.plan import Router

SETTLE_S = 10.0


class Census:
    """Counts answers by status around an ASGI application."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.statuses: Counter[int] = Counter()
        self.slowest = 0.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def count(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.statuses[message["status"]] += 1
            await send(message)

        began = time.monotonic()
        try:
            await self._app(scope, receive, count)
        finally:
            if scope["type"] == "http":
                self.slowest = max(self.slowest, time.monotonic() - began)


def configuration(folder: Path) -> Config:
    """A target and a drafter of the same tiny vocabulary, and room for few sequences only."""
    target, small = (save_checkpoint(folder / str(seed), seed=seed) for seed in (0, 1))
    return parse(
        {
            "target": {
                "model": target,
                "dtype": "float32",
                "max_model_len": 128,
                "kv": {"num_blocks": 64, "block_size": 8},
            },
            "drafters": {
                "lookup": {"method": "ngram", "min_ngram": 1},
                "small": {"method": "model", "model": small},
            },
            "tenants": {"default": {"drafter": "lookup", "speculation": {"gamma": 4, "tree_width": 2}}},
        },
        "tiny server",
    )


def serve(port: int, config: Config) -> dict[str, Any]:
    engine = build_engine(config, oracle=True)
    service = AsyncEngine(engine)
    replica = TargetReplica(config, lambda _: service, ReplicaSettings(threads=1, loopback=False))
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = EOS  # lets an empty prompt through
    app = Census(create_app(replica, tokenizer, Router(config), config))
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn stops at it, and then raises it once more
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
    settle(engine)
    service.shutdown()
    caches = [engine.cache, *(d.cache for d in engine.drafters.values() if hasattr(d, "cache"))]
    return {
        "requests": app.statuses.total(),
        "statuses": dict(sorted(app.statuses.items())),
        "slowest_s": round(app.slowest, 3),
        "kv_held": sum(cache.pool.used for cache in caches),
        "idle": engine.idle,
    }


def settle(engine: Engine) -> None:
    """Lets the engine drop what its clients left."""
    deadline = time.monotonic() + SETTLE_S
    while not engine.idle and time.monotonic() < deadline:
        time.sleep(0.01)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(serve(int(sys.argv[1]), configuration(Path(scratch)))), flush=True)
