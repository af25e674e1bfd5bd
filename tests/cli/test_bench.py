"""`gammaray bench` as a user runs it. No time is asserted: the machine may be busy."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gammaray.actors.link.bench_ends import Payload

SOCKETS_AND_DEVICE = [
    "in process",
    "socket, Unix",
    "socket, TCP",
    "device, gloo",
    "device, gloo, with features",
]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "gammaray.cli", "bench", "engine", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """In a session of its own, none of whose processes may be left."""
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, err = process.communicate(timeout=180)
    assert left(process.pid) == []
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def left(session: int) -> list[str]:
    """Processes of a session that are still there after a moment."""
    deadline = time.monotonic() + 5
    while (found := of_session(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [" ".join(process.cmdline()) for process in found]


def of_session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def test_json_has_the_promised_shape_and_no_process_is_left() -> None:
    done = run("--link", "--no-ray", "--tokens", 7, "--batch", 3, "--repeats", 4, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert set(data) == {"machine", "versions", "payload", "rows", "skipped"}
    assert [row["transport"] for row in data["rows"]] == SOCKETS_AND_DEVICE
    for row in data["rows"]:
        assert set(row) == {"transport", "p50_us", "p90_us", "p99_us", "n"}
        assert row["n"] == 4
        assert 0 < row["p50_us"] <= row["p90_us"] <= row["p99_us"]
    assert [entry["transport"] for entry in data["skipped"]] == ["Ray actor call"]
    payload = data["payload"]
    assert (payload["tokens"], payload["batch"], payload["features_bytes"]) == (7, 3, 7 * 4096)
    assert payload["answer_bytes"] > 7 * 64 * 8 > payload["question_bytes"] > (7 + 3) * 4
    assert {"python", "gammaray", "torch", "ray"} <= set(data["versions"])
    assert {"cores", "memory_gib"} <= set(data["machine"])


@pytest.mark.ray
def test_text_with_an_actor_call() -> None:
    done = run("--link", "--repeats", 3)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line[:28].strip() for line in lines[1:7]] == [*SOCKETS_AND_DEVICE, "Ray actor call"]
    assert all(line.split()[-1] == "3" for line in lines[1:7])
    answer = re.search(r"(\d+) bytes, a TREES frame: 64 drafted tokens", done.stdout)
    assert answer is not None
    assert 64 * 64 * 8 < int(answer[1]) < 64 * 64 * 8 + 2000  # of each token 64 ids and probabilities


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dataset", "none.jsonl"], "gammaray: cannot read data set 'none.jsonl': No such file"),
        (["--link", "--tokens", 31], "31 tokens for 32 sequences: give --tokens between --batch and"),
        (["--link", "--tokens", 65, "--batch", 1], "each draft holds 1 to 64 tokens"),
        (["--link", "--repeats", 0], "Invalid value"),
    ],
)
def test_bad_input_is_exit_code_2_with_a_reason(arguments: list[object], says: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_one_that_is_interrupted(number: signal.Signals) -> None:
    process = subprocess.Popen(
        command("--link", "--no-ray", "--repeats", 10**6),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 90
    while len(of_session(process.pid)) < 1 + 2 + 4:  # a fork server, its tracker, and four workers
        assert time.monotonic() < deadline, "the workers do not come up"
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(number)
    process.wait(60)
    assert left(process.pid) == []


@pytest.mark.parametrize(("tokens", "batch", "depths"), [(64, 32, [2] * 32), (7, 3, [3, 2, 2])])
def test_drafts_hold_all_tokens_together(tokens: int, batch: int, depths: list[int]) -> None:
    assert Payload(tokens, batch).depths == depths


def test_kernels_without_a_gpu_are_checked_and_the_rest_is_listed(tmp_path: Path) -> None:
    out = tmp_path / "found.md"
    arguments = ["bench", "kernels", "--json", "--out", str(out)]
    program = f"import sys\nfrom gammaray import cli\nsys.argv = ['gammaray', *{arguments}]\n" + WITHOUT_RAY
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert {"device", "versions", "rows", "skipped"} <= set(data)
    assert all(check["ok"] for check in data["checks"])
    assert {check["check"].split(",")[0] for check in data["checks"]} >= {"attention", "verification"}
    assert (data["rows"], data["failed"]) == ([], [])
    assert {entry["reason"] for entry in data["skipped"]} == {"there is no GPU"}
    assert "attention: 96 shapes" in out.read_text()


WITHOUT_RAY = """
try:
    cli.main()
finally:
    assert "ray" not in sys.modules, "it is to run where only torch and Triton are"
"""


def test_kernels_refuses_a_file_it_has_no_form_for() -> None:
    command = [sys.executable, "-m", "gammaray.cli", "bench", "kernels", "--out", "found.csv"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "found.csv is neither" in done.stderr


@pytest.mark.parametrize("more", [[], ["--compile"]])
def test_kernels_without_triton_says_how_to_get_it(more: list[str]) -> None:
    """A module that is None cannot be imported, as if it were not there."""
    program = f"""
import sys
sys.modules["triton"] = None
from gammaray import cli
sys.argv = ["gammaray", "bench", "kernels", *{more}]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "bench kernels needs Triton: pip install -e '.[gpu]'" in line


def test_kernels_says_its_exit_codes() -> None:
    command = [sys.executable, "-m", "gammaray.cli", "bench", "kernels", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})
    assert all(code in done.stdout for code in ("0 nothing is wrong", "1 a result is wrong", "2 bad input"))
