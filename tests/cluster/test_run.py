"""`run` from start to end in a process of its own: a model that cannot be served, then one that can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.serving import listeners, reachable_from_elsewhere

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
from gammaray.errors import ConfigError, VocabularyMismatch

ray.cloudpickle.register_pickle_by_value(serving)
config = parse({"target": {"model": "tiny"}, "server": {"port": serving.free_port()}}, "test")
tokenizer = lambda _: serving.ByteTokenizer()

def fail(_):
    raise VocabularyMismatch(10, 20, "small")

try:
    run(config, engine_factory=fail, tokenizer_factory=tokenizer)
except ConfigError as error:
    print("refused:", error, flush=True)
log = pathlib.Path(sys.argv[2])
run(config, engine_factory=lambda _: serving.SlowEngine(log), tokenizer_factory=tokenizer)
"""


@pytest.mark.ray
def test_refused_then_served_then_terminated(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parents[1]), str(tmp_path / "log")]
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "OMP_"))}
    home = tmp_path / "home"
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=bare | {"HOME": str(home)}
    )
    assert process.stdout is not None and process.stderr is not None
    refused, ready, example = (process.stdout.readline() for _ in range(3))
    listening = listeners(psutil.Process(process.pid))
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert refused.startswith("refused: drafter 'small' has a vocabulary of 20 tokens, the target of 10")
    assert ready.startswith("ready: tiny (float32) at http://127.0.0.1:")
    assert example.startswith("try:   curl http://127.0.0.1:")
    assert out == ""
    assert err.splitlines() == ["starting tiny ...", "starting tiny ...", "stopped"]
    assert process.returncode == 0
    assert len(listening) > 5
    assert reachable_from_elsewhere(listening) == []
    assert not home.exists()
    assert len(family) > 3
    assert psutil.wait_procs(family, timeout=30)[1] == []
    # Every core, and told to OpenMP before anything could have imported torch:
    assert (tmp_path / "log").read_text() == f"threads {usable_cores()} torch False\nshut down\n"


def test_the_reason_of_a_failed_start() -> None:
    report = "failed: Traceback\n  ...\ngammaray.errors.ModelUnsupported: no paged attention\n"
    assert isinstance(start_error(report), ConfigError)
    assert str(start_error(report)) == "no paged attention"
    other = start_error("KeyError: 'x'")
    assert type(other) is GammarayError and "KeyError" in str(other)


def test_ready_text_is_a_command_that_works_in_a_shell() -> None:
    text = ready_text("http://127.0.0.1:8000", "tiny", "float32", 3.21)
    assert text.splitlines()[0].startswith("ready: tiny (float32) at http://127.0.0.1:8000 (started in 3.2 s")
    assert text.count("'") == 4
