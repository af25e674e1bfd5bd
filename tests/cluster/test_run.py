"""`run` from start to end in a process of its own: a model that cannot be served, then one that can."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from support.serving import eventually, listeners, reachable_from_elsewhere, word

from gammaray.cluster.run import ready_text, start_error
from gammaray.engine.threads import usable_cores
from gammaray.errors import ConfigError, GammarayError

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import os, pathlib
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the command line sets it before it imports Ray
import ray
from support import serving
from gammaray.cluster.run import run
from gammaray.config import parse
from gammaray.errors import GammarayError, VocabularyMismatch

ray.cloudpickle.register_pickle_by_value(serving)
config = parse({"target": {"model": "tiny"}, "server": {"port": serving.free_port()}}, "test")
tokenizer = lambda _: serving.ByteTokenizer()

def fail(*_):
    raise VocabularyMismatch(10, 20, "small")

def served():
    log = pathlib.Path(sys.argv[2])
    run(config, engine_factory=lambda *_: serving.SlowEngine(log), tokenizer_factory=tokenizer)

def refused():
    run(config, engine_factory=fail, tokenizer_factory=tokenizer)

for what in sys.argv[3:]:
    try:
        {"served": served, "refused": refused}[what]()
    except GammarayError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""
WORDS = 150


@contextmanager
def server(folder: Path, *what: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs those in turn, in a session of its own, without Ray's variables."""
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parents[1]), str(folder / "log"), *what]
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "OMP_"))}
    environment = bare | {"HOME": str(folder / "home")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env=environment, start_new_session=True, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def address(ready: str) -> str:
    assert ready.startswith("ready: tiny (float32) at http://127.0.0.1:")
    return ready.split(" at ")[1].split(" ")[0]


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def session(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Everything that the process started, also what lost its parent."""
    found = []
    for other in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(other.pid) == process.pid and other.status() != psutil.STATUS_ZOMBIE:
                found.append(other)
    return found


def asked(words: int) -> dict[str, object]:
    return {"model": "tiny", "prompt": "hi", "max_tokens": words, "seed": 5, "stream": True}


@pytest.mark.ray
def test_refused_then_served_then_drained(tmp_path: Path) -> None:
    with server(tmp_path, "refused", "served") as process:
        refused, url, example = line(process), address(line(process)), line(process)
        listening, processes = listeners(psutil.Process(process.pid)), family(process)
        with httpx.stream("POST", f"{url}/v1/completions", json=asked(WORDS), timeout=60) as response:
            lines = response.iter_lines()
            events = [next(lines)]
            process.send_signal(signal.SIGTERM)
            eventually(lambda: httpx.get(f"{url}/readyz").status_code == 503)
            late = httpx.post(f"{url}/v1/completions", json=asked(1))
            alive = httpx.get(f"{url}/healthz")
            events += lines
        out, err = process.communicate(timeout=60)
    assert refused.startswith("ConfigError: drafter 'small' has a vocabulary of 20 tokens, the target of 10")
    assert example.startswith("try:   curl http://127.0.0.1:")
    assert late.status_code == 503
    assert late.headers["retry-after"] == "5"
    assert late.json()["error"]["code"] == "shutting_down"
    assert alive.status_code == 200
    told = [json.loads(event.removeprefix("data: ")) for event in events if event and "[DONE]" not in event]
    assert "".join(event["choices"][0]["text"] for event in told) == "".join(word(5, i) for i in range(WORDS))
    assert events[-2] == "data: [DONE]"
    assert out == ""
    assert err.splitlines() == [
        "starting tiny ...",
        "starting tiny ...",
        "draining: 1 request open, new ones get 503; signal again to stop now",
        "stopped",
    ]
    assert process.returncode == 0
    assert len(listening) > 5
    assert reachable_from_elsewhere(listening) == []
    assert not (tmp_path / "home").exists()
    assert len(processes) > 3
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
    assert session(process) == []
    # Every core, and told to OpenMP before anything could have imported torch:
    threads, *requests, end = (tmp_path / "log").read_text().splitlines()
    assert threads == f"threads {usable_cores()} torch False"
    assert requests == ["started", "finished"]
    assert end == "shut down"


@pytest.mark.ray
def test_a_second_signal_stops_at_once_and_tells_the_clients(tmp_path: Path) -> None:
    with server(tmp_path, "served") as process:
        url = address(line(process))
        with httpx.stream("POST", f"{url}/v1/completions", json=asked(4000), timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            eventually(lambda: httpx.get(f"{url}/readyz").status_code == 503)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            *_, last = filter(None, lines)
        out, err = process.communicate(timeout=60)
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "shutting_down"
    assert error["type"] == "overloaded_error"
    assert out.splitlines()[-1] == "GammarayError: stopped; 1 request cut off before the end"
    assert err.splitlines()[1].startswith("draining: 1 request open")
    assert session(process) == []


@pytest.mark.ray
@pytest.mark.parametrize("stage", ["Ray starts", "the replicas start"])
def test_a_signal_during_start_up_leaves_nothing_behind(tmp_path: Path, stage: str) -> None:
    begun = "raylet" if stage == "Ray starts" else "ray::ServeController"
    with server(tmp_path, "served") as process:
        eventually(lambda: any(p.name().startswith(begun) for p in family(process)))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert out == ""
    assert err.splitlines()[0] == "starting tiny ..."
    assert err.splitlines()[-1] == "stopped"
    assert process.returncode == 0
    assert session(process) == []


def test_the_reason_of_a_failed_start() -> None:
    report = "failed: Traceback\n  ...\ngammaray.errors.ModelUnsupported: no paged attention\n"
    assert isinstance(start_error(report), ConfigError)
    assert str(start_error(report)) == "no paged attention"
    other = start_error("KeyError: 'x'")
    assert type(other) is GammarayError and "KeyError" in str(other)


def test_the_command_to_try_asks_for_a_key_where_one_is_needed() -> None:
    assert "Bearer KEY" in ready_text("http://127.0.0.1:8000", "tiny", "float32", 1.0, needs_key=True)
    assert "Bearer" not in ready_text("http://127.0.0.1:8000", "tiny", "float32", 1.0)


def test_ready_text_is_a_command_that_works_in_a_shell() -> None:
    text = ready_text("http://127.0.0.1:8000", "tiny", "float32", 3.21)
    assert text.splitlines()[0].startswith("ready: tiny (float32) at http://127.0.0.1:8000 (started in 3.2 s")
    assert text.count("'") == 4
    body = json.loads(text.split("'")[3])
    assert (body["model"], body["temperature"]) == ("tiny", 0)  # a small model at 1 talks nonsense
