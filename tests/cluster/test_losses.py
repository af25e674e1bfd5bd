"""Replicas that die or get stuck under running requests, on a real Ray cluster."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from support import serving
from support.serving import word

from gammaray.actors.client import RayEngineClient
from gammaray.actors.target import ReplicaSettings, TargetReplica
from gammaray.api.resume import ResumingClient
from gammaray.config import load
from gammaray.engine.engine import Engine, EngineOptions
from gammaray.engine.service import AsyncEngine
from gammaray.types import GenerateRequest, SamplingParams, TokenChunk

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),  # in Ray itself
]
PATIENCE_S = 60.0
TOKENS = 150
TESTS = str(Path(__file__).parents[1])
REPLICA = "ray::ServeReplica:gammaray:target"


def replica() -> psutil.Process:
    return next(p for p in psutil.Process().children(recursive=True) if p.name().startswith(REPLICA))


def logs(deployment: str) -> list[Path]:
    from ray._private.worker import global_worker

    return list(
        Path(global_worker.node.get_logs_dir_path(), "serve").glob(f"replica_gammaray_{deployment}_*")
    )


def stream(url: str, seed: int, n: int = 1) -> tuple[list[str], list[str | None], str]:
    """Texts and finish reasons of the n choices, and the last event."""
    body = {"model": "tiny", "prompt": "hi", "max_tokens": TOKENS, "seed": seed, "n": n, "stream": True}
    texts, finishes, last = [""] * n, [None] * n, ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        assert response.status_code == 200
        for line in filter(None, response.iter_lines()):
            last = line.removeprefix("data: ")
            for choice in json.loads(last)["choices"] if last != "[DONE]" else ():
                texts[choice["index"]] += choice["text"]
                finishes[choice["index"]] = choice["finish_reason"]
    return texts, finishes, last


def test_a_replica_killed_under_streams_is_not_noticed_by_their_readers(cluster: serving.Cluster) -> None:
    before = len(cluster.lines())
    with ThreadPoolExecutor() as pool:
        one, two = pool.submit(stream, cluster.url, 21), pool.submit(stream, cluster.url, 22, n=2)
        whole = pool.submit(httpx.post, f"{cluster.url}/v1/completions", **asked(seed=23))
        serving.eventually(lambda: cluster.lines()[before:].count("started") == 3)
        time.sleep(0.5)  # some chunks on their way
        killed = replica()
        killed.kill()
        for seed, (texts, finishes, last) in ((21, one.result()), (22, two.result())):
            assert set(texts) == {"".join(word(seed, i) for i in range(TOKENS))}
            assert set(finishes) == {"length"}
            assert last == "[DONE]"
        answer = whole.result().json()
    assert answer["choices"][0]["text"] == "".join(word(23, i) for i in range(TOKENS))
    assert answer["usage"]["completion_tokens"] == TOKENS
    assert cluster.lines()[before:].count("started") == 6
    assert replica().pid != killed.pid
    assert sum(log.read_text().count("resuming") for log in logs("ingress")) == 3


def asked(seed: int) -> dict[str, object]:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": TOKENS, "seed": seed}
    return {"json": body, "timeout": PATIENCE_S}


REQUEST = GenerateRequest("r", (1, 2, 3), SamplingParams(temperature=1.0, seed=7, max_tokens=60), n=2)


def real_engine(marker: Path | None) -> AsyncEngine:
    """The engine itself over a model of a few lines; with a marker, one step never ends, once."""
    sys.path.append(TESTS)  # a replica has no other way to find it
    from support import tape

    runner = tape.TapeRunner(max_model_len=200, blocks=200)
    forward = runner.forward

    def freeze(rows: object) -> object:
        if marker and runner.forwards == 20 and not marker.exists():
            marker.write_text(f"{os.getpid()}")
            time.sleep(3600)
        return forward(rows)  # type: ignore[arg-type]

    runner.forward = freeze  # type: ignore[assignment, method-assign]
    return AsyncEngine(Engine(runner, tape.Letters(), options=EngineOptions()), stuck_after_s=2.0)


@pytest.fixture
def stuck(cluster: serving.Cluster, tmp_path: Path) -> Iterator[RayEngineClient]:
    """A second application on the same cluster: a target alone, whose first replica gets stuck."""
    import ray
    from ray import serve

    from gammaray.cluster.app import deployment

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    target = deployment(TargetReplica, "target", 60.0, num_cpus=0)
    marker = tmp_path / "pid"
    application = target.bind(load(), lambda *_: real_engine(marker), ReplicaSettings(1, loopback=True))
    handle = serve.run(application, name="stuck", route_prefix=None)
    yield RayEngineClient(handle)
    serve.delete("stuck")


async def collect(client: ResumingClient) -> list[TokenChunk]:
    return [chunk async for chunk in client.generate(REQUEST)]


def spoken(chunks: list[TokenChunk]) -> list[tuple[list[int], str]]:
    own = [[chunk for chunk in chunks if chunk.sequence == k] for k in range(REQUEST.n)]
    return [([i for c in s for i in c.ids], "".join(c.text for c in s)) for s in own]


def test_a_stuck_step_has_its_replica_replaced_and_the_stream_goes_on(
    stuck: RayEngineClient, tmp_path: Path
) -> None:
    chunks = asyncio.run(collect(ResumingClient(stuck)))
    engine = real_engine(None)
    undisturbed = asyncio.run(collect(ResumingClient(engine)))  # type: ignore[arg-type]
    engine.shutdown()
    assert spoken(chunks) == spoken(undisturbed)
    assert len(spoken(chunks)[0][0]) == 60
    frozen = int((tmp_path / "pid").read_text())
    serving.eventually(lambda: not psutil.pid_exists(frozen))
    health = asyncio.run(stuck.health())
    assert (health.state, health.running, health.kv_total_blocks) == ("ok", 0, 200)
